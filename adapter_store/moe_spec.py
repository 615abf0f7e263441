"""The shapes of a base model's experts: the part of model_spec.py that is about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapter_store.errors import InvalidModel

Shape = tuple[int, int]


@dataclass(frozen=True)
class MoESpec:
    num_experts: int
    layers: frozenset[int]  # those with experts; the others have a plain MLP
    places: Mapping[str, Shape]  # "experts.w1", "router", ... -> (in_features, out_features)
    router_path: str  # where transformers keeps the router, within a layer
    # gpt-oss: gate and up are one matrix with rows that take turns, kept as [experts, in, out].
    fused: bool

    @property
    def hidden_size(self) -> int:
        return self.places["router"][0]


@dataclass(frozen=True, slots=True)
class _Family:
    experts: str  # config field, as are the next two
    inner: str
    shared: str | None = None
    router_path: str = "mlp.gate"
    fused: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "MixtralForCausalLM": _Family("num_local_experts", "intermediate_size"),
    "Qwen2MoeForCausalLM": _Family("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "Qwen3MoeForCausalLM": _Family("num_experts", "moe_intermediate_size"),
    "GptOssForCausalLM": _Family(
        "num_local_experts", "intermediate_size", router_path="mlp.router", fused=True
    ),
}
MOE_ARCHITECTURES = tuple(_FAMILIES)


def read_moe(architecture: str, config: Mapping[str, Any]) -> MoESpec | None:
    """None for a model without experts. Raises InvalidModel, naming the field of config.json."""
    family = _FAMILIES.get(architecture)
    if family is None:
        return None
    # Newer transformers write the count under its other name.
    counts = [family.experts, "num_local_experts"]
    name = next((name for name in counts if config.get(name) is not None), family.experts)
    experts, hidden, inner = (_positive(config, field) for field in (name, "hidden_size", family.inner))
    places: dict[str, Shape] = {"router": (hidden, experts)}
    if family.shared:
        wide = _positive(config, family.shared)
        places |= {f"shared_expert.{kind}": (hidden, wide) for kind in ("gate_proj", "up_proj")}
        places |= {"shared_expert.down_proj": (wide, hidden), "shared_expert_gate": (hidden, 1)}
    if not family.fused:
        places |= {"experts.w1": (hidden, inner), "experts.w3": (hidden, inner)}
    places |= {"experts.w13": (hidden, 2 * inner), "experts.w2": (inner, hidden)}
    return MoESpec(experts, _sparse_layers(config), places, family.router_path, family.fused)


def _sparse_layers(config: Mapping[str, Any]) -> frozenset[int]:
    num_layers = _positive(config, "num_hidden_layers")
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise InvalidModel(f"config.json: decoder_sparse_step must be a positive integer, not {step!r}")
    if not isinstance(dense, list):
        raise InvalidModel(f"config.json: mlp_only_layers must be a list, not {dense!r}")
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise InvalidModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value
