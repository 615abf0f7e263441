"""Block sizes of shrink and expand, by the form of the step and the layer's sizes.

Measured on one H100 80GB HBM3, or an H200 where it says so (triton 3.6, bfloat16, CUDA graphs), with the
layers of Llama-3.1-8B; every figure is us of one layer's shrink and expand. (tokens, adapters) names a point.
"""

from dataclasses import dataclass
from functools import lru_cache

from kernels.metadata.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan

# Above this many inputs (down_proj) K gets more programs.
_WIDE = 8192
SOME_ENTRIES = 8
# From here on an entry list alone fills the card's 132 multiprocessors a few times.
_MANY_ENTRIES = 32
# So many rows by themselves fill it with half of a wide layer's splits.
_FILLING_ROWS = 64
# Rank tile -> 64-row tiles from which on expand walks over those.
_TILED = {32: 32, 64: 1}
# From here on 64-row tiles need no more splits for wide layers than for others.
_MANY_TILES = 32
# Bytes that one program can have on an H100.
_SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """rows: 1, 16 or 64, the height of an entry; fused: one program computes all slices (64-row tiles).

    final: the last program of an entry adds up the splits; else expand does.
    """

    rows: int
    block_rank: int
    block_k: int
    split: int
    final: bool
    num_warps: int
    num_stages: int

    @property
    def fused(self) -> bool:
        return self.rows == ROWS_PER_TILE


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """rows: 1, 16 or 64, the height of an entry; 64 only where the plan has tiles.

    num_stages: of the loop over ranks beyond block_rank. Its buffers and registers are taken also where no
    rank is so high: gate_up, rank 64, 16 rows x 512 columns, 936 at (8192, 8) with 3 stages, 494 with 1.
    """

    rows: int
    block_rank: int
    block_n: int
    num_warps: int
    num_stages: int = 1


@lru_cache(maxsize=1024)
def shrink_config(
    plan: LaunchPlan, slices: int, width: int, element_size: int, *, final: bool = False
) -> ShrinkConfig:
    """The sizes for a layer of `slices` slices over `width` inputs. final: h must hold the sum, not the
    splits."""
    if plan.tiles and not _small_entries_pay(plan, width):
        return _shrink_tiles(plan, slices, width, element_size)
    if plan.rows_per_item == 1:
        return _shrink_single(plan, width, final)
    return _shrink_shared(plan, slices, width, element_size, final)


def _small_entries_pay(plan: LaunchPlan, width: int) -> bool:
    """Whether shrink takes entries of 16 rows where there are 64-row tiles: too few to fill the card."""
    if plan.tiles >= _MANY_TILES or plan.block_rank > 32:
        return False
    # H200 at (512, 8). Rank 32: qkv 14.8 (tiles: 19.5), o 10.4 (11.9), gate_up 31.9 (34.1), down 17.4 (17.2).
    # Rank 16: qkv 12.7 (14.1), o 8.3 (10.9), gate_up 24.2 (28.1), down 15.1 (14.3).
    return width <= _WIDE


def _shrink_single(plan: LaunchPlan, width: int, final: bool) -> ShrinkConfig:
    steps = 1
    if plan.block_rank >= 64:
        # qkv, rank 64: 54.4 at (64, 64), 6.9 at (1, 1); 1024 inputs a program 57.6 and 7.8.
        block_k, num_warps = 256, 2
    elif plan.block_rank == 32:
        # down, H200: 13.5 at (32, 32), 3.7 at (1, 1); 1024 inputs a program, as for the others, 15.2 and 4.0.
        block_k, num_warps = (512, 4) if width > _WIDE else (1024, 8)
    elif width > _WIDE:
        # down: 16.6 at (64, 64) and 4.7 at (8, 8); 2048 inputs a program 18 and 4.9. H200: 12.9 at (64, 64)
        # and 17.8 at (128, 64) with one step a program; two of 1024 12.1 and 17.5, four of 512 13.7 and 15.9.
        # Two steps of fewer rows leave multiprocessors idle: 8.8 at (32, 32), one 7.9.
        block_k, num_warps = 1024, 4
        if plan.items >= 2 * _FILLING_ROWS:
            block_k, steps = 512, 4
        elif plan.items >= _FILLING_ROWS:
            steps = 2
    elif plan.block_rank == 8 and plan.items >= _MANY_ENTRIES:
        # o: 5.3 at (64, 64) with 1024 inputs a program, 5.8 with 2048.
        block_k, num_warps = 1024, 4
    else:
        # Two splits of 2048: qkv 14.9 at (64, 64) with 8 warps, 15.6 with 4; 3.7 and 3.8 at (8, 8).
        block_k, num_warps = 2048, 8 if plan.items >= _MANY_ENTRIES else 4
    split = -(-width // (block_k * steps))
    # Few splits are added up by expand: qkv 14.9 at (64, 64), 15.6 where shrink finishes h.
    return ShrinkConfig(1, plan.block_rank, block_k, split, final or split > 4, num_warps, 2)


def _shrink_shared(plan: LaunchPlan, slices: int, width: int, element_size: int, final: bool) -> ShrinkConfig:
    block_rank, finishes = max(plan.block_rank, ROWS_PER_ITEM), True
    if plan.tiles:
        # (512, 8), H200. Rank 32: qkv 14.8, gate_up 31.9; 512 inputs a step 19.9 and 31.9. o, rank 16: 8.5
        # where expand adds up the splits, 9.9 where shrink does; 8.3 with 2 stages.
        block_k, split, stages = (512 if slices == 1 else 256), 4, 2 if slices == 1 else 3
        if slices == 2 and block_rank == 16:
            # gate_up: 24.2; 256 inputs a step and 4 splits 25.7.
            block_k, split, stages = 512, 8, 2
        finishes = final or slices > 1
    elif plan.items >= _MANY_ENTRIES:
        # (256, 64): 128 inputs a step for qkv 24.6 (256: 28.8), 512 for o 14.7 (256: 16.1).
        block_k, split, stages = {1: 512, 2: 256}.get(slices, 128), 4, 3
        # H200, rank 16: o 11.6, down 18.4 where expand adds up the splits, 12.5 and 19.7 where shrink does.
        finishes = final or slices > 1 or block_rank > 16
    elif slices == 1 and block_rank == 32:
        # H200: o 5.9 at (128, 8), 5.4 at (64, 8), down 9.5 and 8.3; as rank 16 7.7, 6.3, 11.4 and 9.6.
        block_k, split, stages = 256, 16 if width > _WIDE else 8, 4
    elif width > _WIDE:
        # down: 5.7 at (64, 1), 6.8 at (64, 8); 8 splits 6.5 and 7.7.
        block_k, split, stages = 512, 16, 3
    elif slices > 2:
        # qkv: 5.6 at (64, 1), 6.6 at (64, 8); 8 splits 5.7 and 7.7. Rank 32 (H200): 5.8 and 8.6; 6.9 and 7.9.
        block_k, split, stages = 512, 8 if block_rank == 32 and plan.items >= SOME_ENTRIES else 4, 3
    else:
        # o: 4.4 at (64, 1), 5.8 at (64, 8); 256 inputs a step 5.1 and 6.6. gate_up: 7.3 and 11.6. H200, o
        # with 4 stages: 4.8 at (128, 1) and 5.1 at (128, 8), with 2 5.1 and 5.3; at (64, 1) 4.5 and 4.1.
        block_k, split, stages = 512, 8, 4 if slices == 1 and plan.items >= SOME_ENTRIES else 2
    block_k = _fitting(block_k, ROWS_PER_ITEM + block_rank, element_size, stages)
    return ShrinkConfig(ROWS_PER_ITEM, block_rank, block_k, _fit(split, width, block_k), finishes, 4, stages)


def _shrink_tiles(plan: LaunchPlan, slices: int, width: int, element_size: int) -> ShrinkConfig:
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    columns = block_rank * (4 if slices == 3 else slices)
    # down, H200, rank 16: 13.6 at (512, 1), 14.2 at (512, 8); 128 inputs a step 15.6 and 16.1. At (2048, 8)
    # 33.5 and 33.7, at (8192, 8) 110 and 109.
    wide_and_few = width > _WIDE and plan.tiles < _MANY_TILES
    block_k = _fitting(256 if wide_and_few else 128, ROWS_PER_TILE + columns, element_size, stages=4)
    # 4 splits at (512, 8) and (2048, 8), 1 at (8192, 8) (qkv 115, 4 splits 120). down, rank 64: 28.6 at
    # (512, 8) with 8 splits; 69.4 at (2048, 8) with 4, 79.0 with 8.
    split = min(4, max(1, 128 // plan.tiles)) * (2 if wide_and_few else 1)
    # qkv, rank 32: 22.6 at (512, 8) with 8 warps, 24.4 with 4.
    num_warps = 8 if columns >= 128 else 4
    return ShrinkConfig(ROWS_PER_TILE, block_rank, block_k, _fit(split, width, block_k), True, num_warps, 4)


def _fitting(block_k: int, lines: int, element_size: int, stages: int) -> int:
    """The largest step of K whose stages, and the step before them, fit a multiprocessor's shared memory."""
    while block_k * lines * element_size * (stages + 1) > _SHARED_MEMORY:
        block_k //= 2
    return block_k


def _fit(split: int, width: int, block_k: int) -> int:
    return max(1, min(split, -(-width // block_k)))


@lru_cache(maxsize=1024)
def expand_config(plan: LaunchPlan, element_size: int) -> ExpandConfig:
    if plan.rows_per_item == 1:
        if plan.block_rank == 32:
            # H200: qkv 4.7 at (8, 8), 21.0 at (64, 64), o 3.5 and 10.7; 512 columns 5.5, 23.1, 4.3 and 11.5.
            return ExpandConfig(1, 32, 256, 1)
        # 256 columns a warp. Rank 64: 32 ranks at once 53.8 at (64, 64), 64 at once 9.8 at (8, 8) (qkv).
        most_ranks = 32 if plan.items >= _MANY_ENTRIES else 64
        return ExpandConfig(1, min(plan.block_rank, most_ranks), 512, 2)
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    if element_size > 2:
        return ExpandConfig(ROWS_PER_ITEM, block_rank, 64, 4)
    if block_rank in _TILED and plan.tiles >= _TILED[block_rank]:
        # B is read once for 64 rows. gate_up, rank 64: 472 at (8192, 8), 494 with 16 rows x 512 columns; rank
        # 32: 392 and 412 with 16 x 256; rank 16: 375 and 372. 64 or 256 columns, or 8 warps, lose 4 to 40 %.
        return ExpandConfig(ROWS_PER_TILE, block_rank, 128, 4)
    return ExpandConfig(ROWS_PER_ITEM, block_rank, _item_columns(plan), 4)


def _item_columns(plan: LaunchPlan) -> int:
    if plan.parts:
        # Few wide tiles: half of a high-rank item's parts find columns in them, in narrow ones an eighth.
        return 512
    if plan.tiles or plan.items >= _MANY_ENTRIES or plan.block_rank >= 64:
        # gate_up, rank 32: 67.7 at (256, 64), 70.6 with 128 columns, 77.8 with 512.
        return 256
    # gate_up, rank 16: 7.1 at (64, 1), 8.2 with 256 columns; qkv 5.3 and 7.0.
    return 128
