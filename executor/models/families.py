"""What sets the families apart: biases, norms on q and k, windows, rotation, multipliers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from adapter_store.base.config import BaseConfig
from adapter_store.base.fields import Fields
from executor.layers.model_config import MoEConfig, Multipliers, NormNames, SoftCaps
from executor.layers.norm import NormKind
from executor.models.unsupported import unsupported

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Traits:
    windows: Windows
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    moe: MoEConfig | None = None
    unrotated: frozenset[int] = frozenset()
    multipliers: Multipliers = field(default=Multipliers())
    norms: NormNames = field(default=NormNames())
    qk_norm_whole: bool = False
    norm: NormKind = "rms"
    soft_caps: SoftCaps = field(default=SoftCaps())
    interleaved: bool = False
    parallel: bool = False


def llama(base: BaseConfig) -> Traits:
    bias = base.fields.flag("attention_bias")
    return Traits(_one_window(base.fields, None), bias, bias, base.fields.flag("mlp_bias"))


def mistral(base: BaseConfig) -> Traits:
    return Traits(_one_window(base.fields, base.fields.optional_integer("sliding_window")))


def qwen2(base: BaseConfig) -> Traits:
    return Traits(_late_windows(base.fields), qkv_bias=True)


def qwen3(base: BaseConfig) -> Traits:
    bias = base.fields.flag("attention_bias")
    return Traits(_late_windows(base.fields), bias, bias, qk_norm=True)


def smollm3(base: BaseConfig) -> Traits:
    fields, unrotated = base.fields, _unrotated(base.fields)
    bias = fields.flag("attention_bias")
    windows = windows_by_type(fields, used_window(fields), lambda layer: layer in unrotated)
    return Traits(windows, bias, bias, fields.flag("mlp_bias"), unrotated=unrotated)


def granite(base: BaseConfig) -> Traits:
    fields = base.fields
    multipliers = Multipliers(
        embedding=_above_0(fields, "embedding_multiplier"),
        residual=_above_0(fields, "residual_multiplier"),
        scores=_above_0(fields, "attention_multiplier"),
        logits=1 / _above_0(fields, "logits_scaling"),
    )
    return replace(llama(base), multipliers=multipliers)


def olmo2(base: BaseConfig) -> Traits:
    return _olmo(base, _one_window(base.fields, None))


def olmo3(base: BaseConfig) -> Traits:
    fields = base.fields
    windows = windows_by_type(fields, _window(fields), lambda layer: (layer + 1) % 4 != 0)
    return _olmo(base, windows)


def _olmo(base: BaseConfig, windows: Windows) -> Traits:
    bias = base.fields.flag("attention_bias")
    norms = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return Traits(windows, bias, bias, qk_norm=True, norms=norms, qk_norm_whole=True)


def phi3(base: BaseConfig) -> Traits:
    if base.rope.values["rope_type"] not in ("default", "longrope"):
        raise unsupported(base.rope, "rope_type", "of this family only default and longrope are")
    windows = _one_window(base.fields, base.fields.optional_integer("sliding_window"))
    return Traits(windows)


def glm4(base: BaseConfig) -> Traits:
    norms = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    bias, windows = base.fields.flag("attention_bias"), _one_window(base.fields, None)
    return Traits(windows, bias, norms=norms, interleaved=True)


def starcoder2(base: BaseConfig) -> Traits:
    fields = base.fields
    if base.activation != "gelu_pytorch_tanh":
        raise unsupported(fields, "hidden_act", "an MLP without a gate has gelu_pytorch_tanh")
    bias, windows = fields.flag("use_bias"), _one_window(fields, fields.optional_integer("sliding_window"))
    return Traits(windows, bias, bias, bias, norm="biased_layer")


def cohere(base: BaseConfig) -> Traits:
    return _cohere(base, _one_window(base.fields, None))


def cohere2(base: BaseConfig) -> Traits:
    """Layers without a window are those without rotation."""
    fields = base.fields
    interval = fields.optional_integer("sliding_window_pattern") or 4
    windows = windows_by_type(fields, _window(fields), lambda layer: (layer + 1) % interval != 0)
    whole = frozenset(layer for layer, window in enumerate(windows) if window is None)
    return replace(_cohere(base, windows), unrotated=whole)


def _cohere(base: BaseConfig, windows: Windows) -> Traits:
    bias = base.fields.flag("attention_bias")
    return Traits(
        windows,
        bias,
        bias,
        multipliers=Multipliers(logits=_above_0(base.fields, "logit_scale")),
        norms=NormNames(before_mlp=None),
        norm="layer",
        interleaved=True,
        parallel=True,
    )


def gemma2(base: BaseConfig) -> Traits:
    fields = base.fields
    windows = windows_by_type(fields, _window(fields), lambda layer: layer % 2 == 0)
    caps = SoftCaps(_cap(fields, "attn_logit_softcapping"), _cap(fields, "final_logit_softcapping"))
    return replace(_gemma(base, windows), soft_caps=caps)


def gemma3(base: BaseConfig) -> Traits:
    fields = base.fields
    interval = fields.optional_integer("sliding_window_pattern") or 6
    windows = windows_by_type(fields, _window(fields), lambda layer: (layer + 1) % interval != 0)
    caps = SoftCaps(logits=_cap(fields, "final_logit_softcapping"))
    return replace(_gemma(base, windows), qk_norm=True, soft_caps=caps)


def _gemma(base: BaseConfig, windows: Windows) -> Traits:
    bias, scalar = base.fields.flag("attention_bias"), _above_0(base.fields, "query_pre_attn_scalar")
    multipliers = Multipliers(
        embedding=math.sqrt(base.hidden_size),
        embedding_rounded=True,
        scores=None if scalar == base.head_dim else 1 / math.sqrt(scalar),
    )
    norms = NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )
    return Traits(windows, bias, bias, multipliers=multipliers, norms=norms, norm="offset_rms")


FAMILIES: Mapping[str, Callable[[BaseConfig], Traits]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SmolLM3ForCausalLM": smollm3,
    "GraniteForCausalLM": granite,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "Glm4ForCausalLM": glm4,
    "Starcoder2ForCausalLM": starcoder2,
    "CohereForCausalLM": cohere,
    "Cohere2ForCausalLM": cohere2,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
}


def windows_by_type(fields: Fields, window: int | None, slides: Callable[[int], bool]) -> Windows:
    """By `layer_types`; without it, layers where `slides` says so have the window."""
    num_layers, types = fields.integer("num_hidden_layers"), fields.values.get("layer_types")
    if types is None:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not known.keys() >= set(map(str, types)):
        raise unsupported(fields, "layer_types", f"it needs {num_layers} entries out of {sorted(known)}")
    if window is None and "sliding_attention" in types:
        raise unsupported(fields, "layer_types", "sliding_attention needs a sliding_window in use")
    return tuple(known[kind] for kind in types)


def used_window(fields: Fields) -> int | None:
    """The window of a family that has one and must be told to use it."""
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None


def _one_window(fields: Fields, window: int | None) -> Windows:
    if fields.values.get("layer_types") is not None:
        raise unsupported(fields, "layer_types", "this family has one kind of attention in all layers")
    return (window,) * fields.integer("num_hidden_layers")


def _late_windows(fields: Fields) -> Windows:
    first = fields.number("max_window_layers")
    return windows_by_type(fields, used_window(fields), lambda layer: layer >= first)


def _unrotated(fields: Fields) -> frozenset[int]:
    """Layers with a 0 in `no_rope_layers`; without that list, each last one of `no_rope_layer_interval`."""
    layers, marks = range(fields.integer("num_hidden_layers")), fields.values.get("no_rope_layers")
    if marks is None:
        interval = fields.integer("no_rope_layer_interval")
        return frozenset(layer for layer in layers if (layer + 1) % interval == 0)
    if not isinstance(marks, list) or len(marks) < len(layers) or any(mark not in (0, 1) for mark in marks):
        raise fields.wrong("no_rope_layers", f"0 (no rotation) or 1 for each of {len(layers)} layers")
    return frozenset(layer for layer in layers if not marks[layer])


def _window(fields: Fields) -> int:
    """Of a family that always has layers with one."""
    if fields.values.get("sliding_window") is None:
        raise unsupported(fields, "sliding_window", "sliding_attention needs one")
    return fields.integer("sliding_window")


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.values.get(name) is None else _above_0(fields, name)


def _above_0(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if not value > 0:
        raise unsupported(fields, name, "it must be above 0")
    return value
