"""Reads the rotary part of config.json, in the spelling of transformers 5 or of earlier versions.

That is `rope_parameters` in transformers 5, and `rope_scaling` beside `rope_theta` before.
"""

import math

from executor.layers.rotary import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from executor.models.fields import Fields


def read_rope(config: Fields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). As in transformers, rope_scaling wins over rope_parameters, and a theta within wins
    over one beside. Raises UnsupportedModel for types whose numbers would differ here."""
    name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = config.values.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.refuse(name, "it must be one flat object for all layers")
    rope = Fields(values, f"{config.origin}: {name}")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor", "heads are rotated whole")
    kind = "rope_type" if values.get("rope_type") is not None else "type"
    match values.get(kind, "default"):
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(_factor(rope))
        case "llama3":
            return theta, _llama3(rope, _original_max_position(rope, config))
        case "yarn":
            return theta, _yarn(rope, _original_max_position(rope, config))
    raise rope.refuse(kind, "known types are default, linear, llama3, yarn")


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor <= 0:
        raise rope.refuse("factor", "it must be above 0")
    return factor


def _original_max_position(rope: Fields, config: Fields) -> int:
    inner = rope.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
    return config.integer("original_max_position_embeddings", inner)


def _llama3(rope: Fields, original_max_position: int) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low < high:
        raise rope.refuse("low_freq_factor", "it must be above 0 and below high_freq_factor")
    return Llama3Scaling(_factor(rope), low, high, original_max_position)


def _yarn(rope: Fields, original_max_position: int) -> YarnScaling:
    factor = _factor(rope)
    return YarnScaling(
        factor=factor,
        original_max_position=original_max_position,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 0) or 32.0,  # the reference takes 0 for unset, too
        beta_slow=rope.number("beta_slow", 0) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """As given, or the paper's 0.1 ln(factor) + 1, or with DeepSeek's mscale pair a quotient of two such."""

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    inferred = grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1)
    return rope.number("attention_factor", inferred)
