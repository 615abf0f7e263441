"""Block sizes of the fused followers, and which form of a layer pays, by the form of the step.

Measured on one H100 80GB HBM3 (triton 3.6, bfloat16, CUDA graphs) with the layers of Llama-3.1-8B at rank 16;
figures are us of one layer's shrink and follower. (tokens, adapters) names a point.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kernels.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan

Follower = Literal["silu_mul", "add_rms_norm", "rope"]
# pair: shrink, expand, then the follower by itself. fused: shrink, then the follower that also expands.
# beside: as fused, with shrink on a second stream beside the base product.
Form = Literal["pair", "fused", "beside"]

# As many entries as adapters that share their rows: above this the two streams compete for the memory.
_FEW_ENTRIES = 8
_MANY_ENTRIES = 32
# From here on 64-row tiles fill the card.
_MANY_TILES = 128


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """entry_rows: rows that share one read of B, `rows` of them at a time; block_n: columns of a program.

    num_stages: of the loop over ranks beyond block_rank, as ExpandConfig's.
    """

    entry_rows: int
    rows: int
    block_rank: int
    block_n: int
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class NormConfig:
    block_rank: int
    num_warps: int


# Without LoRA, a row a program: SiLU-mul 231 and rotation 70 at 8192 tokens; 512 columns 276 and 119.
PLAIN = FollowerConfig(1, 1, 0, 1024, 4)


def beside_pays(plan: LaunchPlan) -> bool:
    """Whether shrink should run on a second stream beside the base product, whatever follows."""
    return not plan.tiles and plan.items <= _FEW_ENTRIES


def best_form(plan: LaunchPlan, follower: Follower) -> Form:
    """The fastest form measured for steps like the plan's, of a layer with this follower.

    What LoRA adds to the four projections of a layer, as pair / fused / beside: (1, 1) 16.7 / 14.3 / 11.5,
    (64, 1) 29.0 / 25.1 / 15.0, (64, 8) 34.4 / 29.2 / 22.1, (64, 64) 71.1 / 69.4 / 71.7, (256, 64) 112 / 120 /
    126. gate_up at (8192, 8) 404 / 202 / 194, qkv 113 / 103 / 104; o 86 / 91 / 93, down 122 / 133 / 148.
    (Beside: with the shrink launched before the product; SideStream launches it after, which is faster.)
    """
    if plan.tiles:
        return "pair" if follower == "add_rms_norm" else "fused"
    if beside_pays(plan):
        return "beside"
    if plan.rows_per_item > 1 and plan.items >= _MANY_ENTRIES:
        return "pair"
    return "pair" if plan.parts else "fused"


@lru_cache(maxsize=1024)
def silu_mul_config(plan: LaunchPlan, element_size: int) -> FollowerConfig:
    if plan.rows_per_item == 1:
        # 3.0 at (1, 1), 29.9 at (64, 64); 256 columns and 1 warp 3.3 and 30.4, 2 warps 4.0 and 41.1.
        return FollowerConfig(1, 1, min(plan.block_rank, 32), 128, 1)
    # 9.0 at (64, 1), 55.6 at (256, 64), 367 at (8192, 8); 256 columns 9.2, 59.7 and 413. A loop over 64 rows
    # that share B gains 4 at (8192, 8) and loses as much at (2048, 8).
    block_n = 128 if element_size == 2 else 64
    return FollowerConfig(ROWS_PER_ITEM, ROWS_PER_ITEM, max(plan.block_rank, ROWS_PER_ITEM), block_n, 4)


@lru_cache(maxsize=1024)
def rope_config(plan: LaunchPlan, head_dim: int) -> FollowerConfig:
    """block_n is a multiple of the head's columns: whole heads a program."""
    if plan.rows_per_item == 1:
        # 3.0 at (1, 1), 16.0 at (64, 64); 128 columns 3.3 and 15.8, 256 with 2 warps 3.9 and 21.2.
        return FollowerConfig(1, 1, min(plan.block_rank, 32), max(head_dim, 256), 1)
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    if plan.tiles >= _MANY_TILES:
        # 156 at (8192, 8); in items 164. At (2048, 8) items win: 50.1 against 51.6.
        return FollowerConfig(ROWS_PER_TILE, ROWS_PER_ITEM, block_rank, max(head_dim, 256), 4)
    # 6.7 at (64, 1), 30.7 at (256, 64); 256 columns 7.0 and 32.0.
    return FollowerConfig(ROWS_PER_ITEM, ROWS_PER_ITEM, block_rank, max(head_dim, 128), 4)


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
