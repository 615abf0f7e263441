"""Reads config.json and generation_config.json into a ModelConfig."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from executor.errors import UnsupportedModel
from executor.layers.model_config import ModelConfig, MoEConfig
from executor.models.families import FAMILIES, Traits
from executor.models.fields import Fields
from executor.models.moe_families import MOE_FAMILIES
from executor.models.quantization import read_quantization
from executor.models.rope import read_rope

# Fields that would change the maths, with the values (beside null) that leave it alone.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "compression_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # families with experts read them


def read_config(folder: Path, *, expert_parallel: bool = False) -> ModelConfig:
    """Raises BadCheckpoint when a file is missing or malformed, UnsupportedModel for other maths, or for
    `expert_parallel` without experts."""
    config = Fields.from_file(folder / "config.json")
    family = _family(config)
    traits = family(config)
    _check_neutral(config, traits)
    read_quantization(config)  # refuses what could not be loaded
    theta, scaling = read_rope(config)
    bos, eos = _special_tokens(folder, config)
    num_heads = config.integer("num_attention_heads")
    return ModelConfig(
        architecture=config.values["architectures"][0],
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, traits, num_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=config.integer("max_position_embeddings"),
        windows=traits.windows,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tied_head=config.flag("tie_word_embeddings", False),
        bos_token_id=bos,
        eos_token_ids=eos,
        attention_sinks=traits.attention_sinks,
        moe=_experts(traits, expert_parallel),
    )


def _family(config: Fields) -> Callable[[Fields], Traits]:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise config.refuse("architectures", "it must name one architecture")
    families = {**FAMILIES, **MOE_FAMILIES}
    family = families.get(str(names[0]))
    if family is None:
        raise config.refuse("architectures", f"known ones are {', '.join(families)}")
    return family


def _experts(traits: Traits, expert_parallel: bool) -> MoEConfig | None:
    if not expert_parallel:
        return traits.moe
    if traits.moe is None:
        raise UnsupportedModel("--expert-parallel: this model has no experts")
    return replace(traits.moe, expert_parallel=True)


def _check_neutral(config: Fields, traits: Traits) -> None:
    for name, neutral in _NEUTRAL.items():
        if traits.moe and name in _EXPERT_COUNTS:
            continue
        value = config.values.get(name)
        if value is not None and value not in neutral:
            raise config.refuse(name, f"only {neutral or 'null'} is")


def _num_kv_heads(config: Fields, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"it must divide num_attention_heads = {num_heads}")
    return num_kv_heads


def _head_dim(config: Fields, traits: Traits, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", traits.head_dim or hidden_size // num_heads)
    if config.values.get("head_dim") is None and traits.head_dim is None and hidden_size % num_heads:
        raise config.refuse(
            "hidden_size", f"without head_dim, num_attention_heads = {num_heads} must divide it"
        )
    if head_dim % 2:
        raise config.refuse("head_dim", f"the rotation needs an even one, not {head_dim}")
    return head_dim


def _special_tokens(folder: Path, config: Fields) -> tuple[int | None, tuple[int, ...]]:
    """(bos, eos); as in transformers, what generation_config.json says wins."""
    path = folder / "generation_config.json"
    generation = Fields.from_file(path) if path.exists() else Fields({}, str(path))
    bos = generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")
    eos = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    return bos[0] if bos else None, eos
