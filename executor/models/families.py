"""What sets the families apart: where biases are, norms on q and k, which layers have a window.

Defaults for fields that a config.json leaves out are those of the family's class in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from executor.layers.model_config import MoEConfig
from executor.models.fields import Fields

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Traits:
    windows: Windows
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    attention_sinks: bool = False
    moe: MoEConfig | None = None


def llama(config: Fields) -> Traits:
    bias = config.flag("attention_bias", False)
    return Traits(_one_window(config, None), bias, bias, config.flag("mlp_bias", False))


def mistral(config: Fields) -> Traits:
    return Traits(_one_window(config, config.optional_integer("sliding_window", 4096)))


def qwen2(config: Fields) -> Traits:
    return Traits(_windows_by_layer(config), qkv_bias=True)


def qwen3(config: Fields) -> Traits:
    bias = config.flag("attention_bias", False)
    return Traits(_windows_by_layer(config), bias, bias, qk_norm=True, head_dim=128)


FAMILIES: Mapping[str, Callable[[Fields], Traits]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def _one_window(config: Fields, window: int | None) -> Windows:
    if config.values.get("layer_types") is not None:
        raise config.refuse("layer_types", "this family has one kind of attention in all layers")
    return (window,) * config.integer("num_hidden_layers")


def _windows_by_layer(config: Fields) -> Windows:
    """By `layer_types`; without it, layers from max_window_layers on have a window if use_sliding_window."""
    num_layers = config.integer("num_hidden_layers")
    sliding = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if sliding else None
    types = config.values.get("layer_types")
    if types is None:
        full = num_layers if window is None else config.number("max_window_layers", 28)
        return tuple(window if layer >= full else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not known.keys() >= set(map(str, types)):
        raise config.refuse("layer_types", f"it needs {num_layers} entries out of {sorted(known)}")
    if window is None and "sliding_attention" in types:
        raise config.refuse("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
    return tuple(known[kind] for kind in types)
