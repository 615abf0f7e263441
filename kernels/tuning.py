"""Block sizes of the kernels, by the form of the step and the layer's sizes. Numbers: one H100 80GB HBM3."""

from dataclasses import dataclass
from functools import lru_cache

from kernels.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan

# Programs that fill the card: 132 multiprocessors, a few programs each.
_FULL_GRID = 264


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """rows: 1, 16 or 64, the height of an entry; fused: one program computes all slices (64-row tiles)."""

    rows: int
    block_rank: int
    block_k: int
    split: int
    fused: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    rows: int
    block_rank: int
    block_n: int
    num_warps: int


@lru_cache(maxsize=1024)
def shrink_config(plan: LaunchPlan, slices: int, width: int, *, final: bool) -> ShrinkConfig:
    """For a layer of `slices` slices over `width` inputs. final: h gets the sum; else the splits."""
    if plan.tiles:
        split = _split(width, 128, plan.tiles)
        return ShrinkConfig(ROWS_PER_TILE, max(plan.block_rank, 16), 128, split, True, 4, 3)
    if plan.rows_per_item == 1:
        block_k = 256 if plan.items < 8 else 1024
        return ShrinkConfig(1, plan.block_rank, block_k, -(-width // block_k), False, 4, 2)
    split = min(16, -(-width // 256))
    return ShrinkConfig(ROWS_PER_ITEM, max(plan.block_rank, 16), 256, split, False, 4, 3)


@lru_cache(maxsize=1024)
def expand_config(plan: LaunchPlan, columns: int) -> ExpandConfig:
    """For a layer of `columns` output columns in all."""
    if plan.rows_per_item == 1:
        return ExpandConfig(1, min(plan.block_rank, 16), 1024, 4)
    block_n = 512 if plan.tiles else 128
    return ExpandConfig(ROWS_PER_ITEM, max(plan.block_rank, 16), block_n, 4)


def splits_for_expand(plan: LaunchPlan) -> bool:
    """Whether expand adds up the splits: where few rows share a B tile, that beats a finished h."""
    return plan.rows_per_item == 1


def _split(width: int, block_k: int, entries: int) -> int:
    split = 1
    while split * entries < _FULL_GRID // 2 and split * 4 * block_k <= width:
        split *= 2
    return split
