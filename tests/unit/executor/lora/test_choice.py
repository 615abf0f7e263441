"""Which class stands for which layer: the whole product of layer, modules behind it, sharding and ranks."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest
from torch import nn

from executor import layers
from executor.distributed import ParallelGroup
from executor.layers.fused_moe import FusedMoE
from executor.layers.model_config import MoEConfig
from executor.lora import layers as lora
from executor.lora.config import LoRAConfig
from executor.lora.errors import LayerRefused, Refusal
from executor.lora.replace import LAYERS_WITH_LORA, class_for
from tests.unit.executor.lora.expert_checks import FORMS
from tests.unit.executor.lora.layer_cases import CASES, MODEL_CONFIG

Choice = type[lora.BaseLayerWithLoRA]
# Without and with sharding. With one rank it is always the first.
Pair = tuple[Choice, Choice]

COLUMN: Pair = (lora.ColumnParallelLinearWithLoRA, lora.ColumnParallelLinearWithShardedLoRA)
MERGED: Pair = (lora.MergedColumnParallelLinearWithLoRA, lora.MergedColumnParallelLinearWithShardedLoRA)
VARIABLE: Pair = (
    lora.MergedColumnParallelLinearVariableSliceWithLoRA,
    lora.MergedColumnParallelLinearVariableSliceWithShardedLoRA,
)
QKV: Pair = (lora.QKVParallelLinearWithLoRA, lora.QKVParallelLinearWithShardedLoRA)
MERGED_QKV: Pair = (lora.MergedQKVParallelLinearWithLoRA, lora.MergedQKVParallelLinearWithShardedLoRA)
ROW: Pair = (lora.RowParallelLinearWithLoRA, lora.RowParallelLinearWithShardedLoRA)
REPLICATED: Pair = (lora.ReplicatedLinearWithLoRA, lora.ReplicatedLinearWithLoRA)
EMBEDDING: Pair = (lora.VocabParallelEmbeddingWithLoRA, lora.VocabParallelEmbeddingWithLoRA)
EXPERTS: Pair = (lora.FusedMoEWithLoRA, lora.FusedMoEWithShardedLoRA)
EXPERTS_3D: Pair = (lora.FusedMoE3DWithLoRA, lora.FusedMoE3DWithShardedLoRA)
HEAD: Pair = (lora.LogitsProcessorWithLoRA, lora.LogitsProcessorWithLoRA)


class TunedRowParallelLinear(layers.RowParallelLinear):
    """A subclass may compute something else."""


def merged(
    sizes: tuple[int, ...], tensor_parts: tuple[int, ...] = ()
) -> Callable[[ParallelGroup], nn.Module]:
    return lambda group: layers.MergedColumnParallelLinear(8, sizes, False, group, tensor_parts)


def experts(
    *, interleaved: bool = False, expert_parallel: bool = False, gated: bool = True
) -> Callable[[ParallelGroup], nn.Module]:
    config = MoEConfig(
        (True,), 4, 2, 8, True, interleaved=interleaved, expert_parallel=expert_parallel, gated=gated
    )  # fmt: skip
    return lambda group: FusedMoE(8, config, group)


# Layer -> how to make it, and its classes by the number of modules behind it; every other number is refused.
TABLE: Mapping[str, tuple[Callable[[ParallelGroup], nn.Module], Mapping[int, Pair]]] = {
    "ReplicatedLinear": (lambda group: layers.ReplicatedLinear(8, 8, False, group), {1: REPLICATED}),
    "ColumnParallelLinear": (lambda group: layers.ColumnParallelLinear(8, 8, False, group), {1: COLUMN}),
    "merged, 1 part": (merged((8,)), {1: COLUMN}),
    "merged, 2 parts": (merged((8, 4)), {1: COLUMN, 2: MERGED}),
    "merged, 3 parts": (merged((8, 4, 12)), {1: VARIABLE, 3: VARIABLE}),
    "merged, 4 parts": (merged((8, 4, 12, 4)), {1: VARIABLE, 4: VARIABLE}),
    "merged, 3 + 1 parts": (merged((8, 8, 12, 12), (3, 1)), {1: VARIABLE, 2: MERGED, 4: VARIABLE}),
    "merged, 1 + 2 + 1 parts": (merged((8, 8, 12, 12), (1, 2, 1)), {1: VARIABLE, 3: MERGED, 4: VARIABLE}),
    "QKVParallelLinear": (lambda g: layers.QKVParallelLinear(8, 2, 4, 2, False, g), {1: QKV, 3: MERGED_QKV}),
    "RowParallelLinear": (lambda group: layers.RowParallelLinear(8, 8, False, group), {1: ROW}),
    "VocabParallelEmbedding": (lambda group: layers.VocabParallelEmbedding(10, 8, group), {1: EMBEDDING}),
    "FusedMoE": (experts(), {2: EXPERTS_3D, 3: EXPERTS}),
    "FusedMoE, without a gate": (experts(gated=False), {2: EXPERTS}),
    "FusedMoE, interleaved": (experts(interleaved=True), {2: EXPERTS_3D}),
    "LogitsProcessor": (lambda group: layers.LogitsProcessor(10, group), {1: HEAD}),
}
UNKNOWN: Mapping[str, Callable[[ParallelGroup], nn.Module]] = {
    "ParallelLMHead": lambda group: layers.ParallelLMHead(10, 8, group),
    "RMSNorm": lambda group: layers.RMSNorm(8, 1e-5),
    "SiluAndMul": lambda group: layers.SiluAndMul(),
    "Linear": lambda group: nn.Linear(8, 8),
    "a subclass": lambda group: TunedRowParallelLinear(8, 8, False, group),
}
SIZES, MODULES, SHARDINGS = (1, 2, 4), (1, 2, 3, 4, 5), (False, True)


def choose(source: nn.Module, modules: int, fully_sharded: bool) -> Choice | Refusal:
    names = [f"layers.0.module{number}" for number in range(modules)]
    config = LoRAConfig(1, 4, fully_sharded_loras=fully_sharded)
    try:
        return class_for(source, config, names, MODEL_CONFIG)
    except LayerRefused as refused:
        assert (refused.layer, refused.modules) == (type(source).__name__, tuple(names))
        return refused.refusal


@pytest.mark.parametrize("name", TABLE)
def test_every_known_layer(name: str) -> None:
    make, pairs = TABLE[name]
    for size, modules, fully_sharded in product(SIZES, MODULES, SHARDINGS):
        for rank in range(size):
            expected: Choice | Refusal = Refusal.MODULE_COUNT
            if modules in pairs:
                expected = pairs[modules][fully_sharded and size > 1]
            chosen = choose(make(ParallelGroup(rank, size)), modules, fully_sharded)
            assert chosen is expected, (size, rank, modules, fully_sharded)


@pytest.mark.parametrize("name", UNKNOWN)
def test_every_unknown_layer(name: str) -> None:
    for size, modules, fully_sharded in product(SIZES, MODULES, SHARDINGS):
        layer = UNKNOWN[name](ParallelGroup(0, size))
        assert choose(layer, modules, fully_sharded) is Refusal.LAYER_TYPE


def test_an_output_that_ranks_do_not_divide_is_refused_when_b_is_sharded() -> None:
    for size, fully_sharded in product(SIZES, SHARDINGS):
        layer = layers.RowParallelLinear(8, 6, False, ParallelGroup(0, size))
        refused = fully_sharded and size == 4
        expected = Refusal.OUTPUT_SIZE if refused else ROW[fully_sharded and size > 1]
        assert choose(layer, 1, fully_sharded) is expected
        assert choose(layer, 2, fully_sharded) is Refusal.MODULE_COUNT


@pytest.mark.parametrize("interleaved", [False, True])
def test_expert_parallelism_and_sharded_adapters_do_not_go_together(interleaved: bool) -> None:
    modules, (plain, _) = (2, EXPERTS_3D) if interleaved else (3, EXPERTS)
    for size in SIZES:
        layer = experts(interleaved=interleaved, expert_parallel=True)(ParallelGroup(0, size))
        assert choose(layer, modules, False) is plain
        assert choose(layer, modules, True) is (Refusal.EXPERT_PARALLEL if size > 1 else plain)


@pytest.mark.parametrize("name", TABLE)
def test_a_class_answers_for_a_layer_whatever_the_sharding_when_it_is_asked_so(name: str) -> None:
    make, pairs = TABLE[name]
    for size, modules, fully_sharded in product(SIZES, MODULES, SHARDINGS):
        layer, config = make(ParallelGroup(0, size)), LoRAConfig(1, 4, fully_sharded_loras=fully_sharded)
        names = [f"layers.0.module{number}" for number in range(modules)]
        fitting = {
            each for each in LAYERS_WITH_LORA if each.can_replace_layer(layer, config, names, decorate=False)
        }
        assert fitting == set(pairs.get(modules, ()))


def test_the_table_names_every_class() -> None:
    named = {choice for _, pairs in TABLE.values() for pair in pairs.values() for choice in pair}
    assert named == set(LAYERS_WITH_LORA)


def test_a_layer_constructed_with_modules_it_does_not_fit_is_refused() -> None:
    layer = lora.MergedColumnParallelLinearWithLoRA(merged((8, 4, 4))(ParallelGroup()), ["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 modules over 3 parts"):
        layer.parts()


def test_every_class_is_held_against_the_whole_layer() -> None:
    """On 1, 2 and 4 ranks: test_parallel_layers.py and test_expert_layers.py, on CPUs and over NCCL."""
    cases = {each for case in CASES.values() for each in (case.layer_class, case.sharded_class)}
    tested = cases | {form.layer_class for form in FORMS.values()}
    bases = {"BaseLayerWithLoRA", "BaseLinearLayerWithLoRA", "LayerPart"}
    assert {getattr(lora, name) for name in lora.__all__ if name not in bases} == tested - {None}
