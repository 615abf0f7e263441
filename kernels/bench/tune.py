"""Times of other block sizes than the chosen ones, for expand, shrink and the fused followers."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from kernels.bench.inputs import LAYERS, MAX_LORAS, Case, Layer, WeightSet, make_case, weight_sets
from kernels.bench.layer_parts import make_projection
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.launching.follower_tuning import FollowerConfig, rope_config, silu_mul_config
from kernels.launching.side_stream import SideStream
from kernels.launching.tuning import ExpandConfig, ShrinkConfig, expand_config, shrink_config
from kernels.lora_expand import lora_expand
from kernels.lora_shrink import lora_shrink
from kernels.metadata.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan

Kernel = Literal["expand", "shrink", "follower"]
Config = ExpandConfig | ShrinkConfig | FollowerConfig
POINTS = ((64, 1), (64, 8), (256, 64), (512, 8), (2048, 8), (8192, 8))
_EXPAND_ITEMS = ((64, 4), (128, 4), (256, 4), (512, 4))
_EXPAND_TILES = ((64, 4), (128, 4), (128, 8), (256, 8))
_FOLLOWER_ITEMS = ((64, 4), (128, 2), (128, 4), (256, 4))
_FOLLOWER_TILES = ((64, 4), (128, 4), (128, 8))


@dataclass(frozen=True, slots=True)
class Job:
    kernel: Kernel
    layer: Layer
    rank: int


def run(ranks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Rows (op, kernel, layer, tokens, adapters, rank, config, us); us is of shrink and expand, or of shrink
    and follower. The first row of each point is the chosen config's."""
    jobs = list(_jobs(ranks))
    in_processes(compile_job, [(job,) for job in jobs])
    for job in jobs:
        for case in _cases(job, weight_sets(job.layer, job.rank)):
            yield from _measure(job, case)


def _jobs(ranks: tuple[int, ...]) -> Iterator[Job]:
    for rank in ranks:
        for layer in LAYERS:
            yield Job("expand", layer, rank)
            yield Job("shrink", layer, rank)
            if layer.name in ("qkv", "gate_up"):
                yield Job("follower", layer, rank)


def compile_job(job: Job) -> None:
    for case in _cases(job, [WeightSet.random(job.layer, job.rank)]):
        for config in _variants(job, case):
            _call(job, case, config)(0)
    torch.cuda.synchronize()


def _cases(job: Job, weights: list[WeightSet]) -> Iterator[Case]:
    for tokens, adapters in POINTS:
        yield make_case(job.layer, tokens, adapters, [job.rank] * MAX_LORAS, weights, [])


def _measure(job: Job, case: Case) -> Iterator[dict[str, Any]]:
    calls = max(4, min(48, 16384 // case.tokens))
    for config in _variants(job, case):
        (us,) = time_calls([(_call(job, case, config), calls)], rounds=9)
        point = {"layer": job.layer.name, "tokens": case.tokens, "adapters": case.adapters, "rank": job.rank}
        yield {"op": "tune", "kernel": job.kernel, **point, **asdict(config), "us": us}


def _variants(job: Job, case: Case) -> list[Config]:
    plan = case.metas[0].plan
    variants: list[Config]
    if job.kernel == "expand":
        variants = [expand_config(plan, 2), *_expands(plan)]
    elif job.kernel == "shrink":
        chosen = shrink_config(plan, len(job.layer.slices), job.layer.width, 2)
        variants = [chosen, *_shrinks(chosen)]
    else:
        silu = job.layer.name == "gate_up"
        variants = [silu_mul_config(plan, 2) if silu else rope_config(plan, 128), *_followers(plan, silu)]
    return list(dict.fromkeys(variants))


def _expands(plan: LaunchPlan) -> Iterator[ExpandConfig]:
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    for columns, warps in _EXPAND_ITEMS:
        yield ExpandConfig(ROWS_PER_ITEM, block_rank, columns, warps)
    for columns, warps in _EXPAND_TILES if plan.tiles else ():
        yield ExpandConfig(ROWS_PER_TILE, block_rank, columns, warps)


def _shrinks(chosen: ShrinkConfig) -> Iterator[ShrinkConfig]:
    """Stages are for one block_k: half of it leaves room for one more."""
    smaller = replace(chosen, block_k=max(32, chosen.block_k // 2))
    yield replace(chosen, num_stages=chosen.num_stages - 1)
    yield smaller
    yield replace(smaller, num_stages=chosen.num_stages + 1)
    yield replace(chosen, split=chosen.split * 2)
    yield replace(smaller, split=chosen.split * 2)
    yield replace(chosen, num_warps=12 - chosen.num_warps)
    if chosen.split > 1:
        yield replace(chosen, split=chosen.split // 2)


def _followers(plan: LaunchPlan, silu: bool) -> Iterator[FollowerConfig]:
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    for columns, warps in _FOLLOWER_ITEMS:
        if silu or columns >= 128:
            yield FollowerConfig(ROWS_PER_ITEM, block_rank, columns, warps)
    for columns, warps in _FOLLOWER_TILES if plan.tiles else ():
        if silu or columns >= 128:
            yield FollowerConfig(ROWS_PER_TILE, block_rank, columns, warps)


def _call(job: Job, case: Case, config: Config) -> Call:
    if isinstance(config, FollowerConfig):
        projection = make_projection(case, SideStream("cuda"), config)
        return lambda index: projection.add(index, case.xs[index % len(case.xs)])
    plan, starts = case.metas[0].plan, case.column_starts
    slices, metas, sets = len(case.layer.slices), case.metas, case.weights
    shrink = config if isinstance(config, ShrinkConfig) else shrink_config(plan, slices, case.layer.width, 2)
    expand = config if isinstance(config, ExpandConfig) else expand_config(plan, 2)
    splits = (slices,) if shrink.final else (shrink.split, slices)
    shape = (*splits, case.tokens, sets[0].lora_a[0].shape[1])

    def call(index: int) -> None:
        weights, meta = sets[(index // len(metas)) % len(sets)], metas[index % len(metas)]
        turn = index % len(case.xs)
        h = torch.empty(shape, device="cuda")
        lora_shrink(h, case.xs[turn], weights.lora_a, case.ranks, case.scales, meta, shrink)
        lora_expand(case.ys[turn], h, weights.lora_b, case.ranks, starts, meta, config=expand)

    return call
