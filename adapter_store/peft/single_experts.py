"""LoRA on a layer's experts one by one: a pair for each expert's matrix, perhaps not for all."""

from collections.abc import Mapping

from adapter_store.errors import InvalidAdapter
from adapter_store.manifest import ModuleInfo
from adapter_store.module_names import place_of
from adapter_store.moe_spec import MoESpec
from adapter_store.peft.config import LoraSettings
from adapter_store.peft.expert_pair import ExpertPair, check_rank
from adapter_store.peft.shapes import wrong_shape
from adapter_store.peft.stacked import Order, StackedHalf, StackedPair


def from_single(
    name: str, pairs: Mapping[int, ExpertPair], settings: LoraSettings, moe: MoESpec
) -> tuple[ModuleInfo, StackedPair]:
    """`pairs` by expert, of the module `name`. Raises InvalidAdapter, IncompatibleAdapter.

    The packed form has one rank, scale and dtype a module, so the experts must agree.
    """
    in_features, out_features = moe.places[place_of(name)]
    first = pairs[min(pairs)]
    rank, scale = first.a.shape[0], settings.scale_at(first.path)
    for pair in pairs.values():
        wanted = settings.rank_at(pair.path)
        if pair.a.shape[1] != in_features:
            raise wrong_shape(pair.a, (wanted, in_features), base="")
        if pair.b.shape[0] != out_features:
            raise wrong_shape(pair.b, (out_features, wanted), base="")
        pair.check_ranks()
        own = pair.a.shape[0]
        check_rank(pair.a, own, pair.path, settings)
        alike = own == rank and settings.scale_at(pair.path) == scale
        if not alike or (pair.a.dtype, pair.b.dtype) != (first.a.dtype, first.b.dtype):
            raise InvalidAdapter(
                f"tensor {pair.a.name!r} has another rank, scale or dtype than {first.a.name!r}: all experts "
                "of a layer must have the same"
            )
    experts = moe.num_experts
    a = StackedHalf(Order.EACH_A, experts, rank, in_features, {e: pair.a for e, pair in pairs.items()})
    b = StackedHalf(Order.EACH_B, experts, rank, out_features, {e: pair.b for e, pair in pairs.items()})
    return ModuleInfo(name, rank, scale, in_features, out_features, num_experts=experts), StackedPair(a, b)
