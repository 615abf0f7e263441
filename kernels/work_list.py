"""A step's rows, sorted by slot and cut into pieces of GPU work: numpy, from runs, never row by row."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.errors import KernelArgumentError
from kernels.launch_plan import (
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
_ONE_ROW = np.array([0, 0, 1, WHOLE], dtype=np.int32)
# 64-row tiles pay when most of their rows are filled.
_MIN_TILED_ROWS = 512


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


def describe(
    runs: Runs, max_loras: int, max_rows: int, slot_ranks: Ints, plan: LaunchPlan | None
) -> StepWork:
    """Cut a step as `plan` says, or as its rows suggest. Raises KernelArgumentError for a slot outside
    [-1, max_loras), a negative count, more than `max_rows` rows, or a plan that is too small.

    Small arrays: the time is a microsecond an operation, so operations are counted here, not elements.
    """
    pairs = _pairs(runs)
    slots, lengths = pairs[:, 0], pairs[:, 1]
    total, longest = _checked_rows(slots, lengths, max_loras, max_rows)
    # As unsigned, -1 is the largest value; 16 bits are sorted by radix.
    order = slots.astype(np.uint16 if max_loras < 2**16 - 1 else np.uint32).argsort(kind="stable")
    one_row_each = total == len(pairs) and longest <= 1
    totals = np.bincount(slots + 1, weights=None if one_row_each else lengths, minlength=max_loras + 1)
    active = totals[1:].nonzero()[0]
    counts = totals[active + 1].astype(np.int32)
    ranks = slot_ranks[active]
    chosen = plan or _choose(counts, total - int(totals[0]), ranks)
    items = _cut(active, counts, chosen.rows_per_item)
    if chosen.parts:
        items = _high_ranks_first(items, active, ranks, chosen)
    tiles = _cut(active, counts, ROWS_PER_TILE) if chosen.tiles else items[:0]
    base_rows = int(totals[0])
    if plan is None:
        chosen = replace(chosen, items=len(items), tiles=len(tiles), base_rows=base_rows)
    elif len(items) > plan.items or len(tiles) > plan.tiles > 0 or base_rows > plan.base_rows:
        needed = f"{len(items)} items, {len(tiles)} tiles, {base_rows} base rows"
        raise KernelArgumentError("plan", f"{plan} is too small for {needed}")
    if one_row_each:
        return StepWork(slots, order, active, counts, chosen, items, tiles)
    rows = _rows_in_order(lengths, order)
    return StepWork(slots.repeat(lengths), rows, active, counts, chosen, items, tiles)


def _pairs(runs: Runs) -> Ints:
    if not isinstance(runs, np.ndarray):
        return np.fromiter(chain.from_iterable(runs), dtype=np.int32).reshape(-1, 2)
    if runs.dtype != np.int32 or runs.ndim != 2 or runs.shape[1] != 2:
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


def _choose(counts: Ints, rows: int, ranks: Ints) -> LaunchPlan:
    """Which form fits a step with so many adapter rows. Grid sizes are filled in once the lists exist."""
    if rows == 0:
        return LaunchPlan(ROWS_PER_ITEM, RANK_CLASSES[0], 0, 0, False)
    # At two rows an adapter both forms take the same time (H100, kernel by kernel).
    single = rows <= min(2 * len(counts), MAX_SINGLE_ROWS)
    tiled = rows >= max(_MIN_TILED_ROWS, len(counts) * ROWS_PER_TILE)
    lowest, highest = int(ranks.min()), int(ranks.max())
    block_rank = _rank_class(highest)
    if block_rank != _rank_class(lowest):
        block_rank = _typical_class(counts, ranks)
    parts = highest > _HIGH * block_rank and rows <= _MAX_SPLIT_ROWS
    return LaunchPlan(1 if single else ROWS_PER_ITEM, block_rank, 0, int(tiled), parts)


def _rank_class(rank: int) -> int:
    return RANK_CLASSES[min(bisect_left(RANK_CLASSES, rank), len(RANK_CLASSES) - 1)]


def _typical_class(counts: Ints, ranks: Ints) -> int:
    """The smallest class that holds three quarters of the rows: a few high ranks must not slow the rest."""
    ascending = ranks.argsort()
    rows = counts[ascending].cumsum()
    return _rank_class(int(ranks[ascending[rows.searchsorted(0.75 * rows[-1])]]))


def _high_ranks_first(items: Ints, active: npt.NDArray[np.int64], ranks: Ints, plan: LaunchPlan) -> Ints:
    """High-rank items first, in parts where the plan has room: nothing should wait for them at the end."""
    high = ranks[active.searchsorted(items[:, 0])] > _HIGH * plan.block_rank
    parts = items[high].repeat(PARTS, axis=0)
    parts[:, 3] = np.resize(np.arange(PARTS), len(parts))
    fits = not plan.items or len(parts) + len(items) - np.count_nonzero(high) <= plan.items
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
