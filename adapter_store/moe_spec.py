"""The shapes of a base model's experts: the part of model_spec.py that is about them."""

from collections.abc import Mapping
from dataclasses import dataclass

from adapter_store.base.config import BaseConfig

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


def moe_spec(base: BaseConfig) -> MoESpec | None:
    """None for a model without experts."""
    experts, hidden = base.experts, base.hidden_size
    if experts is None:
        return None
    inner, fused = experts.inner, base.architecture == "GptOssForCausalLM"
    places: dict[str, Shape] = {"router": (hidden, experts.count)}
    if experts.shared_inner is not None:
        wide = experts.shared_inner
        places |= {f"shared_expert.{kind}": (hidden, wide) for kind in ("gate_proj", "up_proj")}
        places |= {"shared_expert.down_proj": (wide, hidden), "shared_expert_gate": (hidden, 1)}
    if not fused:
        places |= {"experts.w1": (hidden, inner), "experts.w3": (hidden, inner)}
    places |= {"experts.w13": (hidden, 2 * inner), "experts.w2": (inner, hidden)}
    layers = frozenset(number for number, sparse in enumerate(experts.layers) if sparse)
    return MoESpec(experts.count, layers, places, "mlp.router" if fused else "mlp.gate", fused)
