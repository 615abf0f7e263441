"""Reads the rotary part of a base's config into the scaling that the model computes with."""

import math

from adapter_store.base.fields import Fields
from executor.layers.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from executor.models.unsupported import unsupported


def read_rope(rope: Fields, planes: int, length: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). `planes` are turned of each head, `length` is that of the whole config.

    Raises UnsupportedModel for types whose numbers would differ here.
    """
    theta = rope.number("rope_theta")
    match rope.values["rope_type"]:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(_factor(rope))
        case "llama3":
            return theta, _llama3(rope)
        case "yarn":
            return theta, _yarn(rope)
        case "longrope":
            return theta, _longrope(rope, planes, length)
    raise unsupported(rope, "rope_type", "known types are default, linear, llama3, yarn, longrope")


def turned_dims(rope: Fields, head_dim: int, *, partly: bool) -> int | None:
    """Of each head, how many dimensions are turned; None: all. `partly`: the family may turn a part."""
    share = rope.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return None
    dims = int(head_dim * share)
    if not partly:
        raise unsupported(rope, "partial_rotary_factor", "this family's heads are rotated whole")
    if not 0 < dims < head_dim or dims % 2:
        raise unsupported(rope, "partial_rotary_factor", f"an even part of {head_dim} dimensions is")
    return dims


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor <= 0:
        raise unsupported(rope, "factor", "it must be above 0")
    return factor


def _llama3(rope: Fields) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low < high:
        raise unsupported(rope, "low_freq_factor", "it must be above 0 and below high_freq_factor")
    return Llama3Scaling(_factor(rope), low, high, rope.integer("original_max_position_embeddings"))


def _yarn(rope: Fields) -> YarnScaling:
    factor = _factor(rope)
    return YarnScaling(
        factor=factor,
        original_max_position=rope.integer("original_max_position_embeddings"),
        attention_factor=_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 0) or 32.0,  # the reference takes 0 for unset, too
        beta_slow=rope.number("beta_slow", 0) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def _longrope(rope: Fields, planes: int, length: int) -> LongRopeScaling:
    """For sequences within the original length alone: `BaseConfig.max_length`."""
    old = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor", length / old)
    inferred = math.sqrt(1 + math.log(factor) / math.log(old)) if factor > 1 else 1.0
    factors = rope.values.get("short_factor")
    numbers = isinstance(factors, list) and all(isinstance(each, int | float) for each in factors)
    if not isinstance(factors, list) or not numbers or len(factors) != planes:
        raise rope.wrong("short_factor", f"a list of {planes} numbers")
    return LongRopeScaling(tuple(factors), rope.number("attention_factor", inferred))


def _attention_factor(rope: Fields, factor: float) -> float:
    """As given, or the paper's 0.1 ln(factor) + 1, or with DeepSeek's mscale pair a quotient of two such."""

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    inferred = grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1)
    return rope.number("attention_factor", inferred)
