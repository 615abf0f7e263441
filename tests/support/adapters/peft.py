"""Builders of tiny base models and loud PEFT adapters, as the folders that users would bring.

Bases are real Hugging Face folders with random weights of a fixed seed: D0 and D0t (tied) are Llamas with
vocab 128, hidden 64, intermediate 96, 2 layers, 4 query and 2 KV heads. A loud adapter has non-zero A *and*
B, so that it changes the output: a zero B, PEFT's default start, would hide almost every bug.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)

Kind = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "olmo2",
    "phi3",
    "gemma2",
    "gemma3",
    "olmo3",
    "glm4",
    "cohere",
    "cohere2",
    "starcoder2",
]
CONFIGS: Mapping[Kind, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "olmo3": Olmo3Config,
    "glm4": Glm4Config,
    "starcoder2": Starcoder2Config,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
DENSE = (*ATTENTION, *MLP)
# Of the kinds whose projections have names of their own.
OWN_DENSE: Mapping[Kind, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": (*ATTENTION, "c_fc", "c_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
}
TABLES = ("embed_tokens", "lm_head")


def dense(kind: Kind) -> tuple[str, ...]:
    """The projections of a family's layers."""
    return OWN_DENSE.get(kind, DENSE)


def base_config(kind: Kind = "llama", *, tied: bool = False, **overrides: Any) -> PreTrainedConfig:
    """D0's sizes; `overrides` are fields of the transformers config (num_hidden_layers=4, ...)."""
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "mistral":
        fields["sliding_window"] = None
    return CONFIGS[kind](**(fields | overrides))


def make_base(
    folder: Path,
    kind: Kind = "llama",
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    std: float = 0.05,
    seed: int = 0,
    shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Writes a base model and returns its folder.

    All matrices are drawn N(0, std), biases too (or a lost bias would go unseen); norms stay near 1.
    `shard_size="50KB"` gives a sharded checkpoint with an index.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            base_config(kind, tied=tied, **overrides), dtype=torch.float32
        )
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.normal_(1.0 if "norm" in name else 0.0, std)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load_base(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The oracle's base: eager attention, eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def make_adapter(
    folder: Path,
    base: Path | PreTrainedModel,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] | str = DENSE,
    use_rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    std: float = 0.2,
    **lora_config: Any,
) -> Path:
    """Writes a loud adapter with the real PEFT library and returns its folder.

    targets: module names, "embed_tokens" and "lm_head" among them. std: of A and B; lower it for bigger
    models, where 0.2 saturates the logits. layers: layers_to_transform. lora_config: more LoraConfig fields.
    `base` is a folder, or a model from load_base that is used and left as it was.
    """
    model = base if isinstance(base, PreTrainedModel) else load_base(base)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft serves floats as well
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=use_rslora,
        rank_pattern=dict(rank_pattern or {}),
        alpha_pattern=dict(alpha_pattern or {}),
        layers_to_transform=None if layers is None else list(layers),
        task_type="CAUSAL_LM",
        **lora_config,
    )
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(peft_model.named_parameters()):
            if "lora_magnitude" in name:  # PEFT starts it at the norm of the base's rows
                weight.mul_(1 + torch.randn(weight.shape, generator=generator) * std)
            elif "modules_to_save" in name:  # it starts as a copy of the base's
                weight.add_(torch.randn(weight.shape, generator=generator) * std)
            elif "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    peft_model.save_pretrained(str(folder))
    peft_model.delete_adapter("default")  # else unloading leaves trained copies (modules_to_save) in `base`
    peft_model.unload()
    rewrite(folder, lambda tensors: {n: t.to(dtype) if ".lora_" in n else t for n, t in tensors.items()})
    return folder


def load_adapter(base: Path | PreTrainedModel, folder: Path) -> PeftModel:
    """The oracle with one adapter: float32, eager, eval. A model given as `base` is changed in place."""
    model = base if isinstance(base, PreTrainedModel) else load_base(base)
    return PeftModel.from_pretrained(model, str(folder)).eval()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    """Replaces the adapter's tensors by change(tensors), a function of {name: tensor}."""
    tensors = {name: t.contiguous() for name, t in change(read_tensors(folder)).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Copies, so that the file may be overwritten."""
    return {name: t.clone() for name, t in load_file(folder / "adapter_model.safetensors").items()}


def edit_config(folder: Path, **fields: Any) -> None:
    """Sets fields of adapter_config.json; PEFT itself would refuse to write many of them."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def raw_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Writes a folder without PEFT's help, for files that PEFT does not write (any more)."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": True, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def lora_pair(
    module: str, in_features: int, out_features: int, *, rank: int = 4, std: float = 0.2, seed: int = 0
) -> dict[str, torch.Tensor]:
    """PEFT's two tensors of one linear layer; `module` is its path: "model.layers.0.self_attn.q_proj"."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, in_features, generator=generator) * std,
        f"base_model.model.{module}.lora_B.weight": torch.randn(out_features, rank, generator=generator)
        * std,
    }
