"""Tiny bases with experts, and adapters for them in the forms that trainers write."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")
EXPERT_KINDS = ("experts", "router")
COMMON: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Of each family: 4 experts, top 2, 24 columns within an expert.
FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
        },
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "intermediate_size": 96,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {"intermediate_size": 24, "head_dim": 16, "num_local_experts": 4, "sliding_window": 8},
    ),
}


def make_moe_base(folder: Path, family: str, *, std: float = 0.25, seed: int = 0, **overrides: Any) -> Path:
    """Random float32 weights, biases and sinks included; norms stay near 1."""
    config_class, sizes = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = config_class(**{**COMMON, **sizes, **overrides})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.normal_(1.0 if "norm" in name else 0.0, std)
    model.save_pretrained(folder)
    return folder


def load_moe_base(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make_moe_adapter(
    folder: Path,
    base: Path | PreTrainedModel,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] | str = (),
    parameters: Sequence[str] = (),
    std: float = 0.2,
    **config: Any,
) -> Path:
    """A loud adapter, written by PEFT. `modules` are target_modules, `parameters` target_parameters."""
    model = base if isinstance(base, PreTrainedModel) else load_moe_base(base)
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=modules if isinstance(modules, str) else list(modules),
        target_parameters=list(parameters) or None,
        task_type="CAUSAL_LM",
        **config,
    )
    peft_model = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(peft_model.named_parameters()):
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    peft_model.save_pretrained(str(folder))
    peft_model.unload()
    return folder
