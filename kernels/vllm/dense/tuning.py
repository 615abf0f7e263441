"""Block sizes of the reference API's shrink and expand, by the step's rows and the layer's sizes.

Measured on one H200 (triton 3.6, bfloat16, CUDA graphs), rank 16, with the layers of Llama-3.1-8B; every
figure is us of shrink or of expand of its four layers, or "added", what both add to the base products with
shrink beside them. (tokens, adapters) names a point. Nothing depends on
how many adapters a step has: a captured graph replays steps of all kinds.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import triton

from kernels.vllm.dense.work import FEW_ROWS, MOST_SINGLE_ROWS, TEAM, rows_a_slot

_WIDE = 8192
_NARROW = 4096
# Columns of a head: few adapters have one, so what comes in is zero for most.
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """rows: of a team, or of a tile; rows_a_slot: slots of up to so many rows take them one by one, and 0
    says that a program has a tile; fused: and all slices of it. block_k and alone_k: inputs a step for
    several rows and for one."""

    rows: int
    rows_a_slot: int
    fused: bool
    block_rank: int
    block_k: int
    alone_k: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """rows and rows_a_slot as in ShrinkConfig; columns: that a team shares; block_n and alone_n: columns at
    once for several rows and for one. skip_zeros: h is looked at before B is read."""

    rows: int
    rows_a_slot: int
    block_rank: int
    columns: int
    block_n: int
    alone_n: int
    num_warps: int
    skip_zeros: bool = False


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """rows: that matrix instructions have room for; block_n and block_k: columns of a program, and inputs at
    once; swapped: columns are the instructions' rows."""

    rows: int
    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int
    swapped: bool


@lru_cache(maxsize=4096)
def product_config(rows: int, columns: int, inputs: int) -> ProductConfig | None:
    """None: cuBLAS has it.

    With their LoRA, us of the four layers, beside cuBLAS and between its parts: 182.8 and 175.7 at (64, 64),
    153.0 and 148.6 at (64, 8), 164 and 148 at (32, 32), 134.5 and 127.1 at (8, 8); 220 and 253 at (128, 64).
    """
    if rows > 64:
        return None
    room = 16 if rows <= 16 else max(32, triton.next_power_of_2(rows))
    if room <= 32:
        config = ProductConfig(room, 64, 128, 1, 4, 4, swapped=True)
    elif columns >= 2 * _WIDE:
        # gate_up, (64, 64): 84.4, (64, 8): 70.8; 128 inputs at once 86.5 and 69.7.
        config = ProductConfig(room, 128, 64, 1, 4, 4, swapped=False)
    elif columns <= _NARROW:
        config = ProductConfig(room, 64, 128, 1, 4, 4, swapped=False)
    else:
        # qkv, (64, 64): 28.8; 64 columns a program 30.4.
        config = ProductConfig(room, 32, 128, 1, 4, 3, swapped=False)
    programs = columns // config.block_n
    split = 1 if programs >= 200 else 4 if programs <= 64 and room <= 32 else 2
    if columns % config.block_n or inputs % (config.block_k * split):
        return None
    return replace(config, split=split)


@lru_cache(maxsize=4096)
def shrink_config(rows: int, width: int, slices: int, rank: int, element_size: int = 2) -> ShrinkConfig:
    block_rank, alone = block_rank_of(rank), rows_a_slot(rows, rank)
    if rows <= FEW_ROWS and width <= _WIDE:
        # (1, 1): 4.5, (8, 8): 6.9; 1024 inputs a program 5.6 and 7.7.
        return ShrinkConfig(TEAM, alone, False, block_rank, 256, 512, -(-width // 512), 4, 3)
    if rows <= MOST_SINGLE_ROWS:
        # down, (64, 64): 8.9, two splits of 1024 each 9.9.
        split = -(-width // (2048 if width > _WIDE and rows >= 64 else 1024))
        if rows > 128:
            # (256, 64): 39.9, (256, 8): 24.4; four warps 50.8 and 29.6.
            return ShrinkConfig(TEAM, alone, False, block_rank, 128, 512, split, 2, 4)
        if rows <= 64 and slices == 1 and width <= _WIDE:
            # o, added at (64, 8) and (64, 64) together: 12.9, 1024 inputs a program 15.3.
            return ShrinkConfig(TEAM, alone, False, block_rank, 256, 512, -(-width // 512), 4, 3)
        # Added at (64, 8) and (64, 64) together: 83, 512 inputs a program 86, two warps 87.
        return ShrinkConfig(TEAM, alone, False, block_rank, 256, 1024, split, 4, 3)
    if rows < 1024:
        # (512, 8): 24.9, (512, 64): 48.8; tiles of 64 rows and 8 splits 19.0 and 127.
        return ShrinkConfig(TEAM, 0, False, block_rank, 256, 0, 4, 2, 3)
    columns = block_rank * triton.next_power_of_2(slices)
    # (2048, 8): 41.3, one split 73.6; (8192, 8): 121, 4 splits 141.
    split, num_warps = 4 if rows <= 4096 else 1, 8 if columns >= 128 else 4
    # Four stages of both tiles must fit a multiprocessor's shared memory.
    block_k = (128 if columns <= 128 else 64) * 2 // element_size
    return ShrinkConfig(64, 0, True, block_rank, block_k, 0, split, num_warps, 4)


@lru_cache(maxsize=4096)
def expand_config(rows: int, columns: int, rank: int, *, add_inputs: bool = True) -> ExpandConfig:
    """`columns` of all slices."""
    block_rank, alone = block_rank_of(rank), rows_a_slot(rows, rank)
    if add_inputs and columns >= _VOCABULARY and rows <= MOST_SINGLE_ROWS:
        return ExpandConfig(TEAM, alone, block_rank, 2048, 256, 256, 2, skip_zeros=True)
    if rows <= FEW_ROWS:
        return ExpandConfig(TEAM, alone, block_rank, 512, 256, 512, 2)
    if rows <= 32:
        shared = 1024 if columns > _WIDE else 512
        return ExpandConfig(TEAM, alone, block_rank, shared, 128, 512, 2)
    if rows <= 128 and not add_inputs:
        # Beside a product, which leaves few multiprocessors: gate_up, added at (64, 8) and (64, 64) together,
        # 31.9, 2048 columns a team 36.7; o 14.2, 1024 columns 15.7.
        if columns > _NARROW:
            return ExpandConfig(TEAM, alone, block_rank, 1024, 256, 512, 4)
        return ExpandConfig(TEAM, alone, block_rank, 512, 256, 512, 2)
    if rows <= 128:
        # gate_up, added at (64, 8) and (64, 64) together: 27.9, 1024 columns a team 30.2.
        if columns > _WIDE:
            return ExpandConfig(TEAM, alone, block_rank, 2048, 128, 512, 2)
        # The others: 48.3, with 128 columns at once and two warps 54.3.
        return ExpandConfig(TEAM, alone, block_rank, 1024, 256, 512, 4)
    if rows <= MOST_SINGLE_ROWS:
        # gate_up at (256, 64): 39.1, at (256, 8): 16.8; 1024 columns a team 42.1 and 19.2, the others alike.
        if columns > _WIDE:
            return ExpandConfig(TEAM, alone, block_rank, 2048, 256, 256, 2)
        return ExpandConfig(TEAM, alone, block_rank, 1024, 128, 512, 2)
    if rows <= 1024:
        # (512, 8): 35.9, four tiles of columns a program 47.6.
        return ExpandConfig(TEAM, 0, block_rank, 128, 128, 0, 1)
    # (2048, 8), added to what is there: 121, tiles of 16 rows and one warp 130; written: 69.8 and 75.2, with
    # two warps 73. (16384, 8): 812 and 415.
    num_warps = 4 if rows <= 4096 and not add_inputs else 2
    return ExpandConfig(2 * TEAM, 0, block_rank, 512, 128, 0, num_warps)


def block_rank_of(rank: int) -> int:
    """Ranks at once: 64 at most, and 16 at least, which a matrix instruction takes."""
    power: int = triton.next_power_of_2(rank)
    return min(max(power, 16), 64)
