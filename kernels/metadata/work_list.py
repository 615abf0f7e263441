"""A step's rows, sorted by slot and cut into pieces of GPU work: numpy, from runs, never row by row."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.errors import KernelArgumentError
from kernels.metadata.host_fields import HostFields
from kernels.metadata.launch_plan import (
    MAX_SINGLE_ROWS,
    PARTS,
    RANK_CLASSES,
    ROWS_PER_ITEM,
    ROWS_PER_TILE,
    WHOLE,
    LaunchPlan,
)

Run = tuple[int, int]
Ints = npt.NDArray[np.int32]
# Pairs, or int32 [runs, 2], which saves the time of turning them into an array.
Runs = Iterable[Run] | Ints

# An item of more than this many rank tiles sticks out. Its parts shorten the tail of a small grid; a large
# grid has no tail to shorten.
_HIGH = 4
_MAX_SPLIT_ROWS = 256
# Row by row: up to two rows an adapter, where rank 16 takes the same time in both forms (rank 64: one row, as
# its B is worth reading once), and a few rows of whatever adapters (H100: rank 8, 2.5 to 3.7 us a layer for 8
# rows of 8 adapters, 4.2 to 4.6 for 8 rows of one in an item).
_LOW_RANK = 16
_FEW_ROWS = 8
_ONE_ROW = np.array([0, 0, 1, WHOLE], dtype=np.int32)
# 64-row tiles pay when most of their rows are filled.
_MIN_TILED_ROWS = 512
# Steps of decoding need few different ones, and one takes a microsecond to make.
_plan = lru_cache(maxsize=1024)(LaunchPlan)
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step as arrays. `items` and `tiles` are int32 [n, 4]: (slot, first place, rows, part)."""

    slots: Ints  # per row
    order: npt.NDArray[np.integer[Any]]  # row numbers by ascending slot, base rows last
    active: npt.NDArray[np.int64]  # slots with rows, ascending
    counts: Ints  # their rows
    plan: LaunchPlan
    items: Ints
    tiles: Ints

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_active(self) -> int:
        return len(self.active)

    def write(self, fields: HostFields) -> None:
        used = (len(self.items), len(self.tiles), self.num_active, self.num_rows)
        items, tiles, active, rows = used
        fields.restore_beyond(used)
        fields.items[:items] = self.items
        fields.tiles[:tiles] = self.tiles
        fields.per_lora[:active] = self.counts
        fields.per_lora.cumsum(out=fields.starts[1:])
        fields.ids[:active] = self.active
        fields.mapping[:rows] = self.slots
        fields.order[:rows] = self.order


def describe(
    runs: Runs, max_loras: int, max_rows: int, max_items: int, slot_ranks: Ints, plan: LaunchPlan | None
) -> StepWork:
    """Cut a step as `plan` says, or as its rows suggest. Raises KernelArgumentError for a slot outside
    [-1, max_loras), a negative count, more than `max_rows` rows, or a plan that is too small.

    Small arrays: the time is a microsecond an operation, so operations are counted here, not elements.
    """
    pairs = as_pairs(runs)
    slots, lengths = pairs[:, 0], pairs[:, 1]
    total, longest = _checked_rows(slots, lengths, max_loras, max_rows)
    # As unsigned, -1 is the largest value; 16 bits are sorted by radix.
    order = slots.astype(np.uint16 if max_loras < 2**16 - 1 else np.uint32).argsort(kind="stable")
    one_row_each = total == len(pairs) and longest <= 1
    totals = np.bincount(slots + 1, weights=None if one_row_each else lengths, minlength=max_loras + 1)
    active = totals[1:].nonzero()[0]
    counts = totals[active + 1].astype(np.int32)
    ranks = slot_ranks[active]
    base_rows = int(totals[0])
    chosen = plan or choose(total - base_rows, len(active), *_rank_summary(counts, ranks))
    items = _cut(active, counts, chosen.rows_per_item)
    if chosen.parts:
        items = _high_ranks_first(items, active, ranks, chosen, max_items)
    tiles = _cut(active, counts, ROWS_PER_TILE) if chosen.tiles else items[:0]
    chosen = settled(chosen, plan, len(items), len(tiles), base_rows)
    if one_row_each:
        return StepWork(slots, order, active, counts, chosen, items, tiles)
    rows = _rows_in_order(lengths, order)
    return StepWork(slots.repeat(lengths), rows, active, counts, chosen, items, tiles)


def as_pairs(runs: Runs) -> Ints:
    if not isinstance(runs, np.ndarray):
        return np.fromiter(chain.from_iterable(runs), dtype=np.int32).reshape(-1, 2)
    if runs.dtype != _INT32 or runs.ndim != 2 or runs.shape[1] != 2:
        raise KernelArgumentError("runs", f"must be int32 [runs, 2], are {runs.dtype} {list(runs.shape)}")
    return runs


def _checked_rows(slots: Ints, lengths: Ints, max_loras: int, max_rows: int) -> tuple[int, int]:
    """(all rows, rows of the longest run)."""
    if not len(slots):
        return 0, 0
    # As unsigned, a number below the least is a large one: one maximum checks both ends.
    if (slots + 1).view(np.uint32).max() > max_loras:
        raise KernelArgumentError("runs", f"name a slot outside [-1, {max_loras})")
    longest = int(lengths.view(np.uint32).max())
    if longest >= 2**31:
        raise KernelArgumentError("runs", "hold a negative number of rows")
    total = int(lengths.sum(dtype=np.int64))
    if total > max_rows:
        raise KernelArgumentError("runs", f"hold {total} rows, the buffers {max_rows}")
    return total, longest


def _rows_in_order(lengths: Ints, order: npt.NDArray[np.int64]) -> Ints:
    """Row numbers, run by run in `order`. Runs of a slot keep their order."""
    in_order = lengths[order]
    shift = lengths.cumsum(dtype=np.int32)[order] - in_order.cumsum(dtype=np.int32)
    rows: Ints = shift.repeat(in_order)
    rows += np.arange(len(rows), dtype=np.int32)
    return rows


@lru_cache(maxsize=1024)
def choose(rows: int, active: int, highest: int, class_rows: tuple[int, ...]) -> LaunchPlan:
    """Which form fits a step of so many adapter rows and slots. Grid sizes follow once the lists are cut.

    highest: rank of the active slots; class_rows: how many rows each of RANK_CLASSES has.
    """
    if rows == 0:
        return LaunchPlan(ROWS_PER_ITEM, RANK_CLASSES[0], 0, 0, False)
    tiled = rows >= max(_MIN_TILED_ROWS, active * ROWS_PER_TILE)
    block_rank = _typical_class(rows, class_rows)
    parts = highest > high_limit(block_rank) and rows <= _MAX_SPLIT_ROWS
    low = block_rank <= _LOW_RANK
    single = rows <= min(2 * active if low else active, MAX_SINGLE_ROWS) or (low and rows <= _FEW_ROWS)
    return LaunchPlan(1 if single else ROWS_PER_ITEM, block_rank, 0, int(tiled), parts)


def typical_class(counts: Ints, ranks: Ints) -> int:
    """The one of RANK_CLASSES that steps are cut for whose slots have so many rows and these ranks."""
    return _typical_class(int(counts.sum()), _rank_summary(counts, ranks)[1])


def _typical_class(rows: int, class_rows: tuple[int, ...]) -> int:
    """The smallest class that holds three quarters of the rows: a few high ranks must not slow the rest."""
    reached = 0
    for rank_class, in_class in zip(RANK_CLASSES, class_rows, strict=True):
        reached += in_class
        if 4 * reached >= 3 * rows:
            return rank_class
    return RANK_CLASSES[-1]


def high_limit(block_rank: int) -> int:
    """Items of higher ranks are cut into parts where a plan has parts."""
    return _HIGH * block_rank


def settled(
    chosen: LaunchPlan, given: LaunchPlan | None, items: int, tiles: int, base_rows: int
) -> LaunchPlan:
    """The plan with its sizes; a given one stays. Raises KernelArgumentError where that is too small."""
    if given is None:
        return _plan(chosen.rows_per_item, chosen.block_rank, items, tiles, chosen.parts, base_rows)
    if items > given.items or tiles > given.tiles > 0 or base_rows > given.base_rows:
        needed = f"{items} items, {tiles} tiles, {base_rows} base rows"
        raise KernelArgumentError("plan", f"{given} is too small for {needed}")
    return given


def _rank_summary(counts: Ints, ranks: Ints) -> tuple[int, tuple[int, ...]]:
    """choose's highest and class_rows."""
    classes = np.searchsorted(RANK_CLASSES[:-1], ranks)
    class_rows = np.bincount(classes, weights=counts, minlength=len(RANK_CLASSES))
    return int(ranks.max(initial=0)), tuple(class_rows.astype(np.int64).tolist())


def _high_ranks_first(
    items: Ints, active: npt.NDArray[np.int64], ranks: Ints, plan: LaunchPlan, max_items: int
) -> Ints:
    """High-rank items first, in parts where there is room: nothing should wait for them at the end."""
    high = ranks[active.searchsorted(items[:, 0])] > high_limit(plan.block_rank)
    parts = items[high].repeat(PARTS, axis=0)
    parts[:, 3] = np.resize(np.arange(PARTS), len(parts))
    fits = len(parts) + len(items) - np.count_nonzero(high) <= (plan.items or max_items)
    return np.concatenate([parts if fits else items[high], items[~high]])


def _cut(active: npt.NDArray[np.int64], counts: Ints, rows_per_piece: int) -> Ints:
    if rows_per_piece == 1:
        slots = active.repeat(counts)
        out = np.empty((len(slots), 4), dtype=np.int32)
        out[:] = _ONE_ROW
        out[:, 0] = slots
        out[:, 1] = np.arange(len(slots), dtype=np.int32)
        return out
    pieces = (counts + (rows_per_piece - 1)) // rows_per_piece
    groups = np.empty((len(active), 4), dtype=np.int32)
    groups[:, 0] = active
    groups[:, 1] = counts.cumsum(dtype=np.int32) - counts
    groups[:, 2] = counts
    groups[:, 3] = pieces.cumsum(dtype=np.int32) - pieces
    if len(pieces) == 0 or pieces.max() == 1:
        groups[:, 3] = WHOLE
        return groups
    out = groups.repeat(pieces, axis=0)
    offset = np.arange(len(out), dtype=np.int32)
    offset -= out[:, 3]
    offset *= rows_per_piece
    out[:, 1] += offset
    np.minimum(out[:, 2] - offset, rows_per_piece, out=out[:, 2])
    out[:, 3] = WHOLE
    return out
