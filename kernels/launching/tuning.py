"""Block sizes of shrink and expand, by the form of the step and the layer's sizes.

Measured on one H100 80GB HBM3, or an H200 where it says so (triton 3.6, bfloat16, CUDA graphs), with the
layers of Llama-3.1-8B; every figure is us of one layer's shrink and expand. (tokens, adapters) names a point.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kernels.metadata.launch_plan import ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan

# Above this many inputs (down_proj) K gets more programs.
_WIDE = 8192
SOME_ENTRIES = 8
# From here on an entry list alone fills the card's 132 multiprocessors a few times.
_MANY_ENTRIES = 32
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


class Choice(NamedTuple):
    """Block sizes for some launches, and what they gained where they were chosen: us with them, and others.

    The first row of a table that fits a launch counts. ranks: of the rank tile, from and to. wide: inputs
    above _WIDE or not, None: either. items: at least so many. revision: the commit that chose them.
    """

    ranks: tuple[int, int]
    slices: tuple[int, int]
    wide: bool | None
    items: int
    values: tuple[int, ...]
    card: str
    figures: str
    revision: str


def chosen(rows: Iterable[Choice], rank: int, slices: int, width: int, items: int) -> tuple[int, ...]:
    """The values of the first row that fits."""
    return next(
        row.values
        for row in rows
        if row.ranks[0] <= rank <= row.ranks[1]
        and row.slices[0] <= slices <= row.slices[1]
        and row.wide in (None, width > _WIDE)
        and items >= row.items
    )


_ANY = (0, 1 << 30)
# Rows by themselves: inputs a step, steps a program, warps.
_SINGLE = (
    Choice((64, 1 << 30), _ANY, None, 0, (256, 1, 2), "H100",
           "qkv, rank 64: 54.4 at (64, 64), 6.9 at (1, 1); 1024 inputs 57.6, 7.8", "90750461"),
    Choice((32, 63), _ANY, True, 0, (512, 1, 4), "H200",
           "down: 13.5 at (32, 32), 3.7 at (1, 1); 1024 inputs 15.2, 4.0", "a39ae5b2"),
    Choice((32, 63), _ANY, False, 0, (1024, 1, 8), "H200", "", "a39ae5b2"),
    Choice(_ANY, _ANY, True, 128, (512, 4, 4), "H200",
           "down: 15.9 at (128, 64); one step of 1024 17.8, two 17.5", "51881f7b"),
    Choice(_ANY, _ANY, True, 64, (1024, 2, 4), "H200",
           "down: 12.1 at (64, 64); one step 12.9, four of 512 13.7", "51881f7b"),
    Choice(_ANY, _ANY, True, 0, (1024, 1, 4), "H100, H200",
           "down: 4.7 at (8, 8), 7.9 at (32, 32); 2048 inputs 4.9, two steps 8.8", "51881f7b"),
    Choice((8, 8), _ANY, False, _MANY_ENTRIES, (1024, 1, 4), "H100",
           "o: 5.3 at (64, 64); 2048 inputs 5.8", "90750461"),
    Choice(_ANY, _ANY, False, _MANY_ENTRIES, (2048, 1, 8), "H100",
           "qkv: 14.9 at (64, 64); 4 warps 15.6", "90750461"),
    Choice(_ANY, _ANY, False, 0, (2048, 1, 4), "H100", "qkv: 3.7 at (8, 8); 8 warps 3.8", "90750461"),
)  # fmt: skip
# Entries of 16 rows: inputs a step, splits, stages, whether shrink adds them up (else expand does). First
# those of steps that have 64-row tiles, but too few of them.
_FEW_TILES = (
    Choice((16, 16), (2, 2), None, 0, (512, 8, 2, 1), "H200",
           "gate_up: 24.2 at (512, 8); 256 inputs and 4 splits 25.7", "e0f93acb"),
    Choice(_ANY, (1, 1), None, 0, (512, 4, 2, 0), "H200",
           "o, rank 16: 8.3 at (512, 8); 3 stages 8.5, added up by shrink 9.9", "e0f93acb"),
    Choice(_ANY, _ANY, None, 0, (256, 4, 3, 1), "H200",
           "rank 32 at (512, 8): qkv 14.8, gate_up 31.9; 512 inputs 19.9, 31.9", "a39ae5b2"),
)  # fmt: skip
_SHARED = (
    Choice((0, 16), (1, 1), None, _MANY_ENTRIES, (512, 4, 3, 0), "H100, H200",
           "o 14.7 at (256, 64), 256 inputs 16.1; o 11.6, down 18.4, by shrink 12.5, 19.7", "51881f7b"),
    Choice(_ANY, (1, 1), None, _MANY_ENTRIES, (512, 4, 3, 1), "H100",
           "o 14.7 at (256, 64); 256 inputs 16.1", "90750461"),
    Choice(_ANY, (2, 2), None, _MANY_ENTRIES, (256, 4, 3, 1), "H100", "", "90750461"),
    Choice(_ANY, _ANY, None, _MANY_ENTRIES, (128, 4, 3, 1), "H100",
           "qkv 24.6 at (256, 64); 256 inputs 28.8", "90750461"),
    Choice((32, 32), (1, 1), True, 0, (256, 16, 4, 1), "H200",
           "down 9.5 at (128, 8), 8.3 at (64, 8); as rank 16 11.4, 9.6", "a39ae5b2"),
    Choice((32, 32), (1, 1), False, 0, (256, 8, 4, 1), "H200",
           "o 5.9 at (128, 8), 5.4 at (64, 8); as rank 16 7.7, 6.3", "a39ae5b2"),
    Choice(_ANY, _ANY, True, 0, (512, 16, 3, 1), "H100",
           "down: 5.7 at (64, 1), 6.8 at (64, 8); 8 splits 6.5, 7.7", "50c550c6"),
    Choice((32, 32), (3, 1 << 30), False, SOME_ENTRIES, (512, 8, 3, 1), "H200",
           "qkv: 7.9 at (64, 8); 4 splits 8.6", "a39ae5b2"),
    Choice(_ANY, (3, 1 << 30), False, 0, (512, 4, 3, 1), "H100",
           "qkv: 5.6 at (64, 1), 6.6 at (64, 8); 8 splits 5.7, 7.7", "a39ae5b2"),
    Choice(_ANY, (1, 1), False, SOME_ENTRIES, (512, 8, 4, 1), "H200",
           "o: 4.8 at (128, 1), 5.1 at (128, 8); 2 stages 5.1, 5.3", "51881f7b"),
    Choice(_ANY, _ANY, False, 0, (512, 8, 2, 1), "H100",
           "o: 4.4 at (64, 1), 5.8 at (64, 8); 256 inputs 5.1, 6.6", "51881f7b"),
)  # fmt: skip
# Columns of expand's entries of 16 rows, without parts and tiles.
_COLUMNS = (
    Choice((64, 1 << 30), _ANY, None, 0, (256,), "H100", "", "5bed40f3"),
    Choice(_ANY, _ANY, None, _MANY_ENTRIES, (256,), "H100",
           "gate_up, rank 32: 67.7 at (256, 64); 128 columns 70.6, 512 77.8", "5bed40f3"),
    Choice(_ANY, _ANY, None, 0, (128,), "H100",
           "gate_up, rank 16: 7.1 at (64, 1), qkv 5.3; 256 columns 8.2, 7.0", "5bed40f3"),
)  # fmt: skip


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
    block_k, steps, num_warps = chosen(_SINGLE, plan.block_rank, 1, width, plan.items)
    split = -(-width // (block_k * steps))
    # Few splits are added up by expand: qkv 14.9 at (64, 64), 15.6 where shrink finishes h.
    return ShrinkConfig(1, plan.block_rank, block_k, split, final or split > 4, num_warps, 2)


def _shrink_shared(plan: LaunchPlan, slices: int, width: int, element_size: int, final: bool) -> ShrinkConfig:
    block_rank = max(plan.block_rank, ROWS_PER_ITEM)
    table = _FEW_TILES if plan.tiles else _SHARED
    block_k, split, stages, finishes = chosen(table, block_rank, slices, width, plan.items)
    block_k = _fitting(block_k, ROWS_PER_ITEM + block_rank, element_size, stages)
    split = _fit(split, width, block_k)
    return ShrinkConfig(ROWS_PER_ITEM, block_rank, block_k, split, final or bool(finishes), 4, stages)


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
    if plan.tiles:
        return 256
    (columns,) = chosen(_COLUMNS, plan.block_rank, 1, 0, plan.items)
    return columns
