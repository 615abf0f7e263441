"""Reads config.json's quantization_config: how the checkpoint's weights are stored."""

from typing import Any

from adapter_store.base.fields import Fields
from executor.models.quantized import Fp8, Mxfp4, Scheme
from executor.models.unsupported import unsupported

_NAME = "quantization_config"


def read_quantization(config: Fields) -> Scheme | None:
    """None for plain weights. Raises UnsupportedModel, naming the field, for what is not served."""
    value = config.values.get(_NAME)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise unsupported(config, _NAME, "it must be an object")
    fields = Fields(value, f"{config.origin}: {_NAME}")
    match value.get("quant_method"):
        case "mxfp4":
            return Mxfp4()
        case "fp8":
            return Fp8("weight_scale_inv", _block(fields, "weight_block_size"))
        case "compressed-tensors":
            return _compressed_tensors(fields)
    raise unsupported(fields, "quant_method", "served are fp8, compressed-tensors and mxfp4")


def _compressed_tensors(fields: Fields) -> Scheme:
    """FP8 weights only. Activations, which other engines quantize as well, stay as they are here."""
    if fields.values.get("format") not in ("float-quantized", "naive-quantized"):
        raise unsupported(fields, "format", "float-quantized is served")
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.values.get(name):
            raise unsupported(fields, name, "null is")
    if (fields.values.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise unsupported(fields, "sparsity_config", "only dense weights are")
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unsupported(fields, "config_groups", "it must hold a group")
    blocks = {_group_block(fields, name, group) for name, group in groups.items()}
    if len(blocks - {None}) > 1:
        raise unsupported(fields, "config_groups", "one size of blocks is")
    return Fp8("weight_scale", next(iter(blocks - {None}), None))


def _group_block(fields: Fields, name: str, group: Any) -> tuple[int, int] | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise unsupported(fields, "config_groups", f"{name} has no weights")
    inner = Fields(weights, f"{fields.origin}: {name}")
    for field, served in (("num_bits", (8,)), ("type", ("float",)), ("symmetric", (True, None))):
        if weights.get(field) not in served:
            raise unsupported(inner, field, f"{served[0]} is")
    if weights.get("strategy") not in ("tensor", "channel", "block"):
        raise unsupported(inner, "strategy", "tensor, channel and block are")
    return _block(inner, "block_structure") if weights["strategy"] == "block" else None


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    value = fields.values.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
        raise unsupported(fields, name, "it must be two sizes")
    return value[0], value[1]
