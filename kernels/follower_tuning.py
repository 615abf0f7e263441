"""Block sizes of the fused followers, by the form of the step and the layer's sizes."""

from dataclasses import dataclass
from functools import lru_cache

from kernels.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """entry_rows: rows that share one read of B, `rows` of them at a time; block_n: columns of a program."""

    entry_rows: int
    rows: int
    block_rank: int
    block_n: int
    num_warps: int
    num_stages: int


# Without LoRA: row by row.
PLAIN = FollowerConfig(1, 1, 0, 1024, 4, 1)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """rows: whole rows of a program; 1: B is read for every row, before the row is there. num_ctas: the
    multiprocessors that share a program."""

    rows: int
    block_rank: int
    block_n: int
    num_warps: int
    num_ctas: int


@lru_cache(maxsize=1024)
def silu_mul_config(plan: LaunchPlan, element_size: int) -> FollowerConfig:
    if plan.rows_per_item == 1:
        return FollowerConfig(1, 1, min(plan.block_rank, 32), 256, 2, 1)
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    wide = element_size == 2
    if plan.tiles:
        return FollowerConfig(ROWS_PER_TILE, ROWS_PER_ITEM, min(block_rank, 32), 128 if wide else 64, 4, 2)
    return FollowerConfig(ROWS_PER_ITEM, ROWS_PER_ITEM, block_rank, 128 if wide else 64, 4, 1)


@lru_cache(maxsize=1024)
def add_rms_norm_config(plan: LaunchPlan, rows: int, hidden: int, element_size: int) -> NormConfig:
    block_n = 1 << (hidden - 1).bit_length()
    wide = block_n * element_size
    num_warps = min(16, max(1, wide // 512))
    # 16 warps hold a row and 16 ranks of B in registers, up to 4096 columns of 2 bytes.
    block_rank = min(plan.block_rank, 16, max(1, 131072 // wide))
    several = 4 if rows > 256 and plan.rows_per_item > 1 and wide <= 8192 else 1
    return NormConfig(several, block_rank, block_n, num_warps, 1)


def plain_norm_warps(block_n: int) -> int:
    return min(16, max(1, block_n // 512))


@lru_cache(maxsize=1024)
def rope_config(plan: LaunchPlan, head_dim: int) -> FollowerConfig:
    """block_n is a multiple of the head's columns: whole heads a program."""
    if plan.rows_per_item == 1:
        return FollowerConfig(1, 1, min(plan.block_rank, 32), max(head_dim, 512), 2, 1)
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    if plan.tiles:
        return FollowerConfig(ROWS_PER_TILE, ROWS_PER_ITEM, block_rank, max(head_dim, 256), 4, 2)
    return FollowerConfig(ROWS_PER_ITEM, ROWS_PER_ITEM, block_rank, max(head_dim, 128), 4, 1)
