"""What sets the families with experts apart: how rows choose them, and which layers have a window."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from adapter_store.base.config import BaseConfig, Experts
from executor.layers.model_config import MoEConfig, SwiGLULimits
from executor.models.families import Traits, used_window, windows_by_type


def mixtral(base: BaseConfig, experts: Experts) -> Traits:
    window = base.fields.optional_integer("sliding_window")
    return Traits((window,) * base.num_layers, moe=_moe(base, experts, renormalize=True))


def qwen2_moe(base: BaseConfig, experts: Experts) -> Traits:
    fields = base.fields
    below = fields.number("max_window_layers")
    windows = windows_by_type(fields, used_window(fields), lambda layer: layer % 2 == 0 and layer < below)
    moe = _moe(base, experts, renormalize=fields.flag("norm_topk_prob"))
    return Traits(windows, qkv_bias=fields.flag("qkv_bias"), moe=moe)


def qwen3_moe(base: BaseConfig, experts: Experts) -> Traits:
    bias, window = base.fields.flag("attention_bias"), used_window(base.fields)
    moe = _moe(base, experts, renormalize=base.fields.flag("norm_topk_prob"))
    return Traits((window,) * base.num_layers, bias, bias, qk_norm=True, moe=moe)


def gpt_oss(base: BaseConfig, experts: Experts) -> Traits:
    fields = base.fields
    bias = fields.flag("attention_bias")
    moe = replace(
        _moe(base, experts, renormalize=True),
        biases=True,
        interleaved=True,
        clamped=SwiGLULimits(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
    )
    windows = windows_by_type(fields, fields.optional_integer("sliding_window"), lambda layer: layer % 2 == 0)
    return Traits(windows, bias, bias, attention_sinks=True, moe=moe)


MOE_FAMILIES: Mapping[str, Callable[[BaseConfig, Experts], Traits]] = {
    "MixtralForCausalLM": mixtral,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
}


def _moe(base: BaseConfig, experts: Experts, *, renormalize: bool) -> MoEConfig:
    return MoEConfig(
        layers=experts.layers,
        num_experts=experts.count,
        top_k=base.fields.integer("num_experts_per_tok"),
        intermediate_size=experts.inner,
        renormalize=renormalize,
        shared_intermediate_size=experts.shared_inner,
    )
