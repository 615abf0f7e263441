"""Other block sizes of expand than the chosen ones, each with the chosen shrink before it."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from kernels.bench.inputs import LAYERS, MAX_LORAS, Case, Layer, base_weights, make_case, weight_sets
from kernels.bench.lora_linear import ours
from kernels.bench.precompile import in_processes
from kernels.bench.timing import Call, time_calls
from kernels.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE
from kernels.lora_expand import lora_expand
from kernels.lora_shrink import lora_shrink
from kernels.tuning import ExpandConfig, shrink_config

POINTS = ((64, 1), (64, 8), (128, 8), (256, 64), (512, 8), (512, 64), (2048, 8), (8192, 8))
_WARPS_OF_COLUMNS = ((64, 4), (128, 4), (256, 4), (256, 8), (512, 4), (512, 8))


def run(ranks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Rows (op, layer, tokens, adapters, rank, config, us of the pair, us with the chosen config)."""
    jobs = [(layer, rank) for rank in ranks for layer in LAYERS]
    in_processes(_compile, jobs)
    for layer, rank in jobs:
        for case in _cases(layer, rank):
            yield from _measure(case, rank)


def _compile(layer: Layer, rank: int) -> None:
    for case in _cases(layer, rank):
        for config in _variants(case, rank):
            _pair(case, config)(0)
    torch.cuda.synchronize()


def _cases(layer: Layer, rank: int) -> Iterator[Case]:
    weights, bases = weight_sets(layer, rank), base_weights(layer)
    for tokens, adapters in POINTS:
        yield make_case(layer, tokens, adapters, [rank] * MAX_LORAS, weights, bases)


def _variants(case: Case, rank: int) -> list[ExpandConfig]:
    """Without pipelining a tile holds less shared memory, so more of them share a multiprocessor."""
    plan, block_rank = case.metas[0].plan, max(rank, ROWS_PER_ITEM)
    heights = (ROWS_PER_ITEM, ROWS_PER_TILE) if plan.tiles else (ROWS_PER_ITEM,)
    return [
        ExpandConfig(rows, block_rank, columns, warps, stages)
        for rows in heights
        for columns, warps in _WARPS_OF_COLUMNS
        for stages in (1, 3)
        if rows * columns <= ROWS_PER_TILE * 256
    ]


def _measure(case: Case, rank: int) -> Iterator[dict[str, Any]]:
    calls = max(4, min(48, 16384 // case.tokens))
    (chosen_us,) = time_calls([(ours(case), calls)], rounds=9)
    for config in _variants(case, rank):
        (us,) = time_calls([(_pair(case, config), calls)], rounds=9)
        point = {"layer": case.layer.name, "tokens": case.tokens, "adapters": case.adapters, "rank": rank}
        yield {"op": "tune", **point, **asdict(config), "us": us, "chosen_us": chosen_us}


def _pair(case: Case, config: ExpandConfig) -> Call:
    starts, metas, sets = case.column_starts, case.metas, case.weights
    plan, slices = metas[0].plan, len(case.layer.slices)
    shrink = shrink_config(plan, slices, case.layer.width, 2)
    splits = (slices,) if shrink.final else (shrink.split, slices)
    shape = (*splits, case.tokens, sets[0].lora_a[0].shape[1])

    def call(index: int) -> None:
        weights, meta = sets[(index // len(metas)) % len(sets)], metas[index % len(metas)]
        turn = index % len(case.xs)
        h = torch.empty(shape, device="cuda")
        lora_shrink(h, case.xs[turn], weights.lora_a, case.ranks, case.scales, meta, shrink)
        lora_expand(case.ys[turn], h, weights.lora_b, case.ranks, starts, meta, config=config)

    return call
