"""Block sizes of the fused followers, and which form of a layer pays, by the form of the step.

Measured on one H100 80GB HBM3 (triton 3.6, bfloat16, CUDA graphs) with the layers of Llama-3.1-8B at rank 16;
figures are us of one layer's shrink and follower. (tokens, adapters) names a point.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kernels.metadata.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan

Follower = Literal["silu_mul", "add_rms_norm", "rope"]
# pair: shrink, expand, then the follower by itself. fused: shrink, then the follower that also expands.
# beside: as fused, with shrink on a second stream beside the base product.
Form = Literal["pair", "fused", "beside"]

# Entries of up to 16 rows: above this the two streams compete for the memory, until a step has so many 64-row
# tiles that shrink fills the product's tail.
_FEW_ENTRIES = 24
_MANY_TILES = 128
_MANY_ENTRIES = 32
# With more rows without an adapter than so many times those that the entries have room for, the follower runs
# by itself.
MOSTLY_BASE = 4


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """rows: 1, 16 or 64, the height of an entry, 64 only where the plan has tiles; block_n: columns of a
    program; num_stages: as ExpandConfig's."""

    rows: int
    block_rank: int
    block_n: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class NormConfig:
    block_rank: int
    num_warps: int


# Without LoRA, a row a program: SiLU-mul 231 and rotation 70 at 8192 tokens; 512 columns 276 and 119.
PLAIN = FollowerConfig(1, 0, 1024, 4)


def beside_pays(plan: LaunchPlan) -> bool:
    """Whether shrink should run on a second stream beside the base product, fused or not.

    Added to the products, behind / beside: 30.5 / 21.0 at (64, 1), 73.4 / 69.1 at (64, 64), 108 / 113 at
    (256, 64), 85.3 / 97.0 at (512, 8), 705 / 682 at (8192, 8). With followers, on an H200: 40.8 / 24.9 at
    (64, 16), 48.6 / 47.4 at (256, 8).
    """
    if plan.tiles:
        return plan.tiles >= _MANY_TILES
    return not plan.parts and (plan.rows_per_item == 1 or plan.items <= _FEW_ENTRIES)


def best_form(plan: LaunchPlan, follower: Follower) -> Form:
    """The fastest form measured for steps like the plan's, of a layer with this follower.

    What LoRA adds to a projection and its follower, as pair / fused / beside: qkv 4.0 / 3.4 / 1.3 at (1, 1),
    8.2 / 7.9 / 5.2 at (64, 8), 16.5 / 15.6 / 15.7 at (64, 64), 113 / 92 / 82 at (8192, 8); gate_up 391 / 101
    / 74 there, 30 / 28 / 27 at (64, 64); o 84 / 185 / 170 at (8192, 8), and 76 where the pair's shrink runs
    beside the product: for a pair, ask beside_pays too.

    Where few of many rows have an adapter the fused followers are cut for those few: 8 of 8192 rows, as pair
    / beside, qkv 6 / 175, gate_up 8 / 1003, o 6 / 98; 64 of them 8 / 50, 14 / 41, 3 / 100. With 64-row tiles
    less is lost, and gate_up gains: of 512 rows 17 / 58, 38 / 26, of 2048 36 / 56 and 107 / 39.
    """
    if not plan.tiles and plan.base_rows > MOSTLY_BASE * plan.items * plan.rows_per_item:
        return "pair"
    if plan.tiles and follower == "add_rms_norm":
        return "pair"
    if beside_pays(plan):
        return "beside"
    if plan.tiles:
        return "fused"
    if plan.rows_per_item > 1 and plan.items >= _MANY_ENTRIES:
        return "fused" if follower == "silu_mul" else "pair"
    return "pair" if plan.parts else "fused"


@lru_cache(maxsize=1024)
def silu_mul_config(plan: LaunchPlan, element_size: int) -> FollowerConfig:
    if plan.rows_per_item == 1:
        # 3.0 at (1, 1), 29.9 at (64, 64); 256 columns and 1 warp 3.3 and 30.4, 2 warps 4.0 and 41.1.
        return FollowerConfig(1, min(plan.block_rank, 32), 128, 1)
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    if element_size > 2:
        return FollowerConfig(ROWS_PER_ITEM, block_rank, 64, 4)
    if block_rank >= 64:
        # 490 at (8192, 8) with 64 rows, 532 with 16; 121 at (256, 64).
        return FollowerConfig(ROWS_PER_TILE if plan.tiles else ROWS_PER_ITEM, block_rank, 128, 4)
    # 44.9 at (256, 64), 303 at (8192, 8); with 4 warps 47.4 and 317, 3 stages 54.9 and 368, 64 rows 348.
    return FollowerConfig(ROWS_PER_ITEM, block_rank, 128, 2 if plan.items >= _MANY_ENTRIES else 4)


@lru_cache(maxsize=1024)
def rope_config(plan: LaunchPlan, head_dim: int) -> FollowerConfig:
    """block_n is a multiple of the head's columns: whole heads a program."""
    if plan.rows_per_item == 1:
        # 3.0 at (1, 1), 16.0 at (64, 64); 128 columns 3.3 and 15.8, 256 with 2 warps 3.9 and 21.2.
        return FollowerConfig(1, min(plan.block_rank, 32), max(head_dim, 256), 1)
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    # 29.3 at (256, 64), 148 at (8192, 8); 256 columns 31.0 and 150, 3 stages 30.9 and 157, 64 rows 176. At
    # rank 64 and (8192, 8) 224, with 64 rows 210.
    rows = ROWS_PER_TILE if plan.tiles and block_rank >= 64 and head_dim <= 128 else ROWS_PER_ITEM
    return FollowerConfig(rows, block_rank, max(head_dim, 128), 4)


@lru_cache(maxsize=1024)
def add_rms_norm_config(plan: LaunchPlan, hidden: int, element_size: int) -> NormConfig:
    row_bytes = (1 << (hidden - 1).bit_length()) * element_size
    # A program holds a row and, from before the row is there, 16 ranks of B: 64 registers of 16 warps at 4096
    # columns. o: 5.0 at (64, 1), 8.6 at (64, 64); 8 ranks 6.6 and 9.9, 8 warps 5.9 and 8.7.
    block_rank = min(plan.block_rank, 16, max(1, 131072 // row_bytes))
    return NormConfig(block_rank, min(16, max(1, row_bytes // 512)))


def plain_norm_warps(rows: int, columns: int) -> int:
    """Without LoRA, 4096 columns: 2.3 us at 256 rows with 16 warps, 2.9 with 8; 1.6 and 1.5 at 64 rows."""
    return min(16 if rows > 128 else 8, max(1, columns // 256))
