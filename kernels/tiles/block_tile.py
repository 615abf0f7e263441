"""Pieces of kernels that walk blocks of rows of one slot and, perhaps, one expert. Needs triton."""

import triton
import triton.language as tl

# Where a block comes from.
ITEMS = tl.constexpr(0)  # the step's items or tiles: kernels/metadata/meta.py
BLOCKS = tl.constexpr(1)  # a table of expert choices: kernels/launching/moe_blocks.py
PAIRS = tl.constexpr(2)  # none: each expert choice is a block


@triton.jit
def begin(PDL: tl.constexpr, EARLY: tl.constexpr):
    """EARLY: blocks and weights were written long ago, and are read while the kernel before still runs.

    Else everything before this kernel is complete when it lets the next one start; so that one may be EARLY.
    """
    if PDL:
        if not EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_if_early(PDL: tl.constexpr, EARLY: tl.constexpr):
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_wait()


@triton.jit
def load_block(
    work, row_slots, expert_map, index, num_places, known,
    MAX_LORAS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, KIND: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """(slot, expert, first place, rows); rows is 0 for an idle or impossible block.

    The first part of a high-rank item stands for all of it.
    """
    if KIND == PAIRS:
        first = index
        count = tl.cast(1, tl.int32)
        slot = tl.load(row_slots + index // TOPK)
        expert = tl.load(work + index).to(tl.int32)
        if HAS_MAP:
            expert = tl.load(expert_map + expert, mask=(expert >= 0) & (expert < known), other=-1)
    else:
        entry = work + index * 4
        slot = tl.load(entry)
        second = tl.load(entry + 1)
        third = tl.load(entry + 2)
        fourth = tl.load(entry + 3)
        if KIND == ITEMS:
            expert = tl.cast(0, tl.int32)
            first = second
            count = tl.where(fourth > 0, 0, third)
        else:
            expert = second
            first = third
            count = fourth
    possible = (slot >= 0) & (slot < MAX_LORAS) & (expert >= 0) & (expert < NUM_EXPERTS)
    possible = possible & (first >= 0) & (first + count <= num_places)
    return slot, expert, first, tl.where(possible, count, 0)


@triton.jit
def load_ids(ids, first, count, ROWS: tl.constexpr, KIND: tl.constexpr):
    """int64 numbers of a block's rows or pairs: a scalar for one-row blocks, else [ROWS]; 0 where none is."""
    if KIND == PAIRS:
        return first.to(tl.int64)
    elif ROWS == 1:
        return tl.load(ids + first, mask=count > 0, other=0).to(tl.int64)
    else:
        place = tl.arange(0, ROWS)
        return tl.load(ids + first + place, mask=place < count, other=0).to(tl.int64)


@triton.jit
def table_entry(table, s, slot, expert, slice_stride, slot_stride, expert_stride, mask, other):
    """The entry of a [slices, max_loras, experts] table with any strides."""
    place = s * slice_stride + slot.to(tl.int64) * slot_stride + expert * expert_stride
    return tl.load(table + place, mask=mask, other=other)


@triton.jit
def rows_by(places, columns, stride, ROWS: tl.constexpr):
    """Offsets of columns in rows: [columns] for one row, else [ROWS, columns]."""
    if ROWS == 1:
        return places * stride + columns
    else:
        return places[:, None] * stride + columns[None, :]


@triton.jit
def columns_of(rows, columns, ROWS: tl.constexpr):
    """Pointers to columns of the rows that `rows` points to."""
    if ROWS == 1:
        return rows + columns
    else:
        return rows[:, None] + columns[None, :]


@triton.jit
def valid_by(count, columns_valid, ROWS: tl.constexpr):
    """Which of those are the block's. One row is always there: a block without rows has ended."""
    if ROWS == 1:
        return columns_valid
    else:
        return (tl.arange(0, ROWS) < count)[:, None] & columns_valid[None, :]


@triton.jit
def places_from(first, ROWS: tl.constexpr):
    if ROWS == 1:
        return first.to(tl.int64)
    else:
        return first.to(tl.int64) + tl.arange(0, ROWS)


@triton.jit
def zeros_of(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if ROWS == 1:
        return tl.zeros([COLUMNS], dtype=tl.float32)
    else:
        return tl.zeros([ROWS, COLUMNS], dtype=tl.float32)


@triton.jit
def times_columns(tile, factors, ROWS: tl.constexpr, ALIKE: tl.constexpr):
    """factors: a scalar for all columns where they are ALIKE."""
    if ROWS == 1 or ALIKE:
        return tile * factors
    else:
        return tile * factors[None, :]


@triton.jit
def times_rows(tile, factors, ROWS: tl.constexpr):
    if ROWS == 1:
        return tile * factors
    else:
        return tile * factors[:, None]
