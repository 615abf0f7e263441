"""A base's config as the decoder needs it, and the refusal of maths that this executor does not have."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from adapter_store.base import families as base_families
from adapter_store.base.config import BaseConfig
from adapter_store.base.end_tokens import read_end_tokens
from adapter_store.module_names import FUSED
from executor.errors import UnsupportedModel
from executor.layers.activation import Activation
from executor.layers.model_config import ModelConfig, MoEConfig, Rope
from executor.models.families import FAMILIES, Traits
from executor.models.moe_families import MOE_FAMILIES
from executor.models.quantization import read_quantization
from executor.models.rope import read_rope, turned_dims
from executor.models.unsupported import unsupported

# Fields that would change the maths, with the values (beside null) that leave it alone. A family reads those
# that it has a default for.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "compression_config": (),
    "attn_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # families with experts read them


def read_config(folder: Path, *, expert_parallel: bool = False) -> ModelConfig:
    """Raises InvalidModel when a file is missing or malformed, UnsupportedModel for other maths, or for
    `expert_parallel` without experts."""
    base = BaseConfig.from_folder(folder)
    traits = _traits(base)
    _check_neutral(base)
    read_quantization(base.fields)  # refuses what could not be loaded
    if base.head_dim % 2:
        raise unsupported(base.fields, "head_dim", f"the rotation needs an even one, not {base.head_dim}")
    partly = base_families.FAMILIES[base.architecture].partial_rotation is not None
    turned = turned_dims(base.rope, base.head_dim, partly=partly)
    planes, length = (turned or base.head_dim) // 2, base.fields.integer("max_position_embeddings")
    theta, scaling = read_rope(base.rope, planes, length)
    return ModelConfig(
        architecture=base.architecture,
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        num_layers=base.num_layers,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rms_norm_eps=base.norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=base.max_length,
        windows=traits.windows,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tied_head=base.tied_head,
        eos_token_ids=read_end_tokens(folder),
        attention_sinks=traits.attention_sinks,
        moe=_experts(traits, expert_parallel),
        unrotated=traits.unrotated,
        multipliers=traits.multipliers,
        norms=traits.norms,
        fused_projections=frozenset(base.own_projections) & FUSED.keys(),
        gated="c_fc" not in base.own_projections,
        qk_norm_whole=traits.qk_norm_whole,
        activation=_activation(base),
        norm=traits.norm,
        soft_caps=traits.soft_caps,
        window_rope=Rope(*read_rope(base.window_rope, planes, length)) if base.window_rope else None,
        turned_dims=turned,
        interleaved=traits.interleaved,
        parallel=traits.parallel,
    )


def _traits(base: BaseConfig) -> Traits:
    if base.experts is None:
        return FAMILIES[base.architecture](base)
    return MOE_FAMILIES[base.architecture](base, base.experts)


def _experts(traits: Traits, expert_parallel: bool) -> MoEConfig | None:
    if not expert_parallel:
        return traits.moe
    if traits.moe is None:
        raise UnsupportedModel("--expert-parallel: this model has no experts")
    return replace(traits.moe, expert_parallel=True)


def _activation(base: BaseConfig) -> Activation:
    known = ("silu",) if base.experts else tuple(_ACTIVATIONS)
    if base.activation not in known:
        name = base_families.FAMILIES[base.architecture].activation
        raise unsupported(base.fields, name, f"known are {', '.join(known)}")
    return _ACTIVATIONS[base.activation]


def _check_neutral(base: BaseConfig) -> None:
    read = base_families.FAMILIES[base.architecture].defaults
    for name, neutral in _NEUTRAL.items():
        if name in read or (base.experts and name in _EXPERT_COUNTS):
            continue
        value = base.fields.values.get(name)
        if value is not None and value not in neutral:
            raise unsupported(base.fields, name, f"only {neutral or 'null'} is")
