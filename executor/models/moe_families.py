"""What sets the families with experts apart: how many there are, in which layers, how rows choose.

As in families.py, defaults are those of the family's class in transformers.
"""

from collections.abc import Callable, Mapping

from executor.layers.model_config import MoEConfig, SwiGLULimits
from executor.models.families import Traits, Windows
from executor.models.fields import Fields


def mixtral(config: Fields) -> Traits:
    num_layers = config.integer("num_hidden_layers")
    moe = MoEConfig(
        layers=(True,) * num_layers,
        num_experts=config.integer("num_local_experts", 8),
        top_k=_top_k(config, 2),
        intermediate_size=config.integer("intermediate_size"),
        renormalize=True,
    )
    return Traits((config.optional_integer("sliding_window", None),) * num_layers, moe=moe)


def qwen2_moe(config: Fields) -> Traits:
    moe = MoEConfig(
        layers=_sparse_layers(config),
        num_experts=config.integer("num_experts", 60),
        top_k=_top_k(config, 4),
        intermediate_size=config.integer("moe_intermediate_size", 1408),
        renormalize=config.flag("norm_topk_prob", False),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", 5632),
    )
    return Traits(_qwen2_windows(config), qkv_bias=config.flag("qkv_bias", True), moe=moe)


def qwen3_moe(config: Fields) -> Traits:
    num_layers, bias = config.integer("num_hidden_layers"), config.flag("attention_bias", False)
    # Written as num_experts by the family's own tools, as num_local_experts by newer transformers.
    experts = "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
    moe = MoEConfig(
        layers=_sparse_layers(config),
        num_experts=config.integer(experts, 128),
        top_k=_top_k(config, 8),
        intermediate_size=config.integer("moe_intermediate_size", 768),
        renormalize=config.flag("norm_topk_prob", False),
    )
    sliding = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if sliding else None
    return Traits((window,) * num_layers, bias, bias, qk_norm=True, moe=moe)


def gpt_oss(config: Fields) -> Traits:
    bias = config.flag("attention_bias", True)
    moe = MoEConfig(
        layers=(True,) * config.integer("num_hidden_layers"),
        num_experts=config.integer("num_local_experts", 128),
        top_k=_top_k(config, 4),
        intermediate_size=config.integer("intermediate_size"),
        renormalize=True,
        biases=True,
        interleaved=True,
        clamped=SwiGLULimits(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
    )
    windows = _windows_by_type(
        config, config.optional_integer("sliding_window", 128), lambda layer: layer % 2 == 0
    )
    return Traits(windows, bias, bias, head_dim=64, attention_sinks=True, moe=moe)


MOE_FAMILIES: Mapping[str, Callable[[Fields], Traits]] = {
    "MixtralForCausalLM": mixtral,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
}


def _top_k(config: Fields, default: int) -> int:
    return config.integer("num_experts_per_tok", default)


def _sparse_layers(config: Fields) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise config.refuse("mlp_only_layers", "it must be a list of layer numbers")
    num_layers = config.integer("num_hidden_layers")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(layers):
        raise config.refuse("mlp_only_layers", "no layer would have experts")
    return layers


def _qwen2_windows(config: Fields) -> Windows:
    sliding = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if sliding else None
    below = config.number("max_window_layers", 28)
    return _windows_by_type(
        config, window, lambda layer: window is not None and layer % 2 == 0 and layer < below
    )


def _windows_by_type(config: Fields, window: int | None, slides: Callable[[int], bool]) -> Windows:
    """By `layer_types`; without it, layers where `slides` says so have the window."""
    num_layers = config.integer("num_hidden_layers")
    types = config.values.get("layer_types")
    if types is None:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not known.keys() >= set(map(str, types)):
        raise config.refuse("layer_types", f"it needs {num_layers} entries out of {sorted(known)}")
    if window is None and "sliding_attention" in types:
        raise config.refuse("layer_types", "sliding_attention needs a sliding_window in use")
    return tuple(known[kind] for kind in types)
