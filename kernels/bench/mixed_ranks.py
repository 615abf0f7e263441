"""What one high rank costs the others: 63 tokens of rank 8 and one of rank 256, against 64 of rank 8."""

from typing import Any

from torch import Tensor

from kernels.bench.inputs import (
    LAYERS,
    MAX_LORAS,
    Case,
    Layer,
    WeightSet,
    base_weights,
    make_case,
    weight_sets,
)
from kernels.bench.lora_linear import ours
from kernels.bench.timing import time_calls
from kernels.metadata.work_list import Run

HIGH, LOW, TOKENS = 256, 8, 64
# What the slots of `small_slots` hold: the least that a server of adapters of rank 8 would be given.
SMALL = 16


def run() -> list[dict[str, Any]]:
    """Rows (op, layer, tokens, adapters, rank, case, ours_us); rank is the highest in the step. Slots hold up
    to rank 256, but for `small_slots` up to 16."""
    rows = []
    for layer in LAYERS:
        bases = base_weights(layer)
        for max_rank in (SMALL, HIGH):
            weights = weight_sets(layer, max_rank)
            for name, runs, high in _cases(max_rank):
                case = _case(layer, runs, high, weights, bases)
                (us,) = time_calls([(ours(case), 16 * len(weights))], rounds=25)
                point = {"tokens": TOKENS, "adapters": len(runs), "rank": HIGH if high else LOW}
                rows.append({"op": "mixed_ranks", "layer": layer.name, **point, "case": name, "ours_us": us})
    return rows


def _cases(max_rank: int) -> list[tuple[str, list[Run], bool]]:
    distinct = [(slot, 1) for slot in range(TOKENS)]
    if max_rank == SMALL:
        return [("distinct_low_small_slots", distinct, False)]
    shared = [(0, TOKENS - 1), (TOKENS - 1, 1)]
    return [
        ("distinct_low", distinct, False),
        ("distinct_one_high", distinct, True),
        ("shared_low", shared, False),
        ("shared_one_high", shared, True),
    ]


def _case(layer: Layer, runs: list[Run], high: bool, weights: list[WeightSet], bases: list[Tensor]) -> Case:
    ranks = [LOW] * (MAX_LORAS - 1) + [HIGH if high else LOW]
    case = make_case(layer, TOKENS, MAX_LORAS, ranks, weights, bases)
    for meta in case.metas:
        meta.prepare_tensors(runs)
    return case
