"""A step's rows, sorted by slot and cut into pieces of GPU work: numpy, from runs, never row by row."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

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

# Splitting a high-rank item shortens the tail of a small grid; a large grid has no tail to shorten.
_MAX_SPLIT_GRID = 192
# 64-row tiles pay when most of their rows are filled.
_MIN_TILED_ROWS = 512


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step as arrays. `items` and `tiles` are int32 [n, 4]: (slot, first place, rows, part)."""

    slots: Ints  # per row
    order: Ints  # row numbers by ascending slot, base rows last
    active: Ints  # slots with rows, ascending
    counts: Ints  # their rows
    plan: LaunchPlan
    items: Ints
    tiles: Ints


def describe(
    runs: Iterable[Run], max_loras: int, max_rows: int, slot_ranks: Ints, plan: LaunchPlan | None
) -> StepWork:
    """Cut a step as `plan` says, or as its rows suggest. Raises KernelArgumentError for a slot outside
    [-1, max_loras), a negative count, more than `max_rows` rows, or a plan that is too small."""
    slots, lengths = _checked(runs, max_loras, max_rows)
    # As unsigned, -1 is the largest value; 16 bits are sorted by radix.
    order = np.argsort(slots.astype(np.uint16 if max_loras < 2**16 - 1 else np.uint32), kind="stable")
    totals = np.bincount(slots + 1, weights=lengths, minlength=max_loras + 1)[1:]
    active = totals.nonzero()[0].astype(np.int32)
    counts = totals[active].astype(np.int32)
    ranks = slot_ranks[active]
    chosen = plan or _choose(counts, ranks)
    items = _items(active, counts, ranks, chosen)
    tiles = _cut(active, counts, ROWS_PER_TILE) if chosen.tiles else items[:0]
    if plan is None:
        chosen = LaunchPlan(chosen.rows_per_item, chosen.block_rank, len(items), len(tiles))
    elif len(items) > plan.items or len(tiles) > plan.tiles > 0:
        raise KernelArgumentError("plan", f"{plan} is too small for {len(items)} items, {len(tiles)} tiles")
    return StepWork(slots.repeat(lengths), _sorted_rows(lengths, order), active, counts, chosen, items, tiles)


def _checked(runs: Iterable[Run], max_loras: int, max_rows: int) -> tuple[Ints, Ints]:
    pairs = np.fromiter(chain.from_iterable(runs), dtype=np.int64).reshape(-1, 2)
    slots, lengths = pairs[:, 0], pairs[:, 1]
    if pairs.size:
        if slots.min() < -1 or slots.max() >= max_loras:
            raise KernelArgumentError("runs", f"name a slot outside [-1, {max_loras})")
        if lengths.min() < 0:
            raise KernelArgumentError("runs", "hold a negative number of rows")
        if lengths.sum() > max_rows:
            raise KernelArgumentError("runs", f"hold {lengths.sum()} rows, the buffers {max_rows}")
    return slots.astype(np.int32), lengths.astype(np.int32)


def _sorted_rows(lengths: Ints, order: npt.NDArray[np.int64]) -> Ints:
    """Row numbers run by run in `order`: rows of a run stay neighbours, runs of a slot keep their order."""
    in_order = lengths[order]
    row_starts = (lengths.cumsum(dtype=np.int32) - lengths)[order]
    place_ends = in_order.cumsum(dtype=np.int32)
    rows = int(place_ends[-1]) if len(place_ends) else 0
    return np.arange(rows, dtype=np.int32) + (row_starts - place_ends + in_order).repeat(in_order)


def _choose(counts: Ints, ranks: Ints) -> LaunchPlan:
    """Which form fits the step. The grid sizes are filled in once the lists exist."""
    if len(counts) == 0:
        return LaunchPlan(ROWS_PER_ITEM, RANK_CLASSES[0], 0, 0)
    rows = int(counts.sum())
    # At two rows an adapter both forms take the same time (H100, kernel-by-kernel).
    single = rows <= min(2 * len(counts), MAX_SINGLE_ROWS)
    tiled = rows >= max(_MIN_TILED_ROWS, len(counts) * ROWS_PER_TILE)
    return LaunchPlan(1 if single else ROWS_PER_ITEM, _block_rank(counts, ranks), 0, int(tiled))


def _block_rank(counts: Ints, ranks: Ints) -> int:
    """The smallest class that holds three quarters of the rows: a few high ranks must not slow the rest."""
    ascending = ranks.argsort()
    rows = counts[ascending].cumsum()
    typical = ranks[ascending[rows.searchsorted(0.75 * rows[-1])]]
    return next((height for height in RANK_CLASSES if typical <= height), RANK_CLASSES[-1])


def _items(active: Ints, counts: Ints, ranks: Ints, plan: LaunchPlan) -> Ints:
    """Items in slot order; where a few ranks stick out, those first and in parts: nothing waits for them."""
    items = _cut(active, counts, plan.rows_per_item)
    if len(active) == 0 or ranks.max() <= 4 * plan.block_rank or len(items) > _MAX_SPLIT_GRID:
        return items
    high = ranks[active.searchsorted(items[:, 0])] > 4 * plan.block_rank
    parts = items[high].repeat(PARTS, axis=0)
    parts[:, 3] = np.resize(np.arange(PARTS), len(parts))
    split = np.concatenate([parts, items[~high]])
    if plan.items and len(split) > plan.items:
        return np.concatenate([items[high], items[~high]])
    return split


def _cut(active: Ints, counts: Ints, rows_per_piece: int) -> Ints:
    pieces = -(-counts // rows_per_piece)
    ends = pieces.cumsum(dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    out = np.empty((total, 4), dtype=np.int32)
    offset = (np.arange(total, dtype=np.int32) - (ends - pieces).repeat(pieces)) * rows_per_piece
    place_starts = counts.cumsum(dtype=np.int32) - counts
    out[:, 0] = active.repeat(pieces)
    out[:, 1] = place_starts.repeat(pieces) + offset
    out[:, 2] = np.minimum(counts.repeat(pieces) - offset, rows_per_piece)
    out[:, 3] = WHOLE
    return out
