"""Checks a checkpoint's experts against its config, in every layout that checkpoints have for them."""

from collections.abc import Mapping

from adapter_store.errors import InvalidModel
from adapter_store.moe_spec import MoESpec

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor name -> (dtype, shape)
_LEAVES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PARENTS = ("mlp", "block_sparse_moe")


def check_experts(moe: MoESpec, weights: Shapes) -> None:
    """Raises InvalidModel, naming the tensor."""
    for layer in sorted(moe.layers):
        wanted = _wanted(moe, layer, weights)
        for name, shape in wanted.items():
            _, found = weights.get(name, ("", None))
            if found != shape:
                raise InvalidModel(f"{name} has shape {found}, config.json says {list(shape)}")


def _wanted(moe: MoESpec, layer: int, weights: Shapes) -> dict[str, tuple[int, ...]]:
    hidden, wide = moe.places["experts.w13"]
    inner, experts = wide // 2, moe.num_experts
    for parent in _PARENTS:
        for gate, up, down in _LEAVES:
            prefix = f"model.layers.{layer}.{parent}.experts"
            if f"{prefix}.0.{gate}.weight" in weights:
                shapes = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
                return {
                    f"{prefix}.{expert}.{leaf}.weight": shape
                    for expert in range(experts)
                    for leaf, shape in shapes.items()
                }
    prefix = f"model.layers.{layer}.mlp.experts"
    if f"{prefix}.gate_up_proj_scales" in weights:  # MXFP4: 32 values a scale, two in a byte
        return {
            f"{prefix}.{name}_blocks": (experts, out, into // 32, 16)
            for name, out, into in (("gate_up_proj", wide, hidden), ("down_proj", hidden, inner))
        }
    w13, w2 = (hidden, wide), (inner, hidden)
    if not moe.fused:
        w13, w2 = w13[::-1], w2[::-1]
    return {f"{prefix}.gate_up_proj": (experts, *w13), f"{prefix}.down_proj": (experts, *w2)}
