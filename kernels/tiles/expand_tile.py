"""Pieces of the kernels that end in an adapter's delta: B, h and their product. Needs triton."""

import triton
import triton.language as tl

from kernels.tiles.device import load_item, load_rows


@triton.jit
def load_entry(
    work, entry, listed, starts, num_rows,
    MAX_LORAS: tl.constexpr, ENTRY_ROWS: tl.constexpr, HAS_LORA: tl.constexpr,
):  # fmt: skip
    """(slot, first place, rows) of an entry, for kernels that must see all rows of a step.

    The first `listed` entries are the work list's; the base rows follow, slot -1, from the place behind the
    last adapter's. The first part of a high-rank item stands for all of it. Without LoRA all rows are alike.
    """
    slot = tl.cast(-1, tl.int32)
    if not HAS_LORA:
        start = entry * ENTRY_ROWS
        count = tl.minimum(num_rows - start, ENTRY_ROWS)
    elif entry < listed:
        slot, start, count, part = load_item(work, entry, num_rows, MAX_LORAS)
        count = tl.where(part > 0, 0, count)
    else:
        start = tl.load(starts + MAX_LORAS) + (entry - listed) * ENTRY_ROWS
        count = tl.minimum(num_rows - start, ENTRY_ROWS)
    return slot, start, tl.maximum(count, 0)


@triton.jit
def rows_at(order, start, count, ROWS: tl.constexpr, HAS_LORA: tl.constexpr):
    """int64 row numbers of places: a scalar for one row, else [ROWS]. Without LoRA nothing was sorted."""
    if HAS_LORA:
        return load_rows(order, start, count, ROWS)
    elif ROWS == 1:
        return start.to(tl.int64)
    else:
        return (start + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def load_rank(ranks, s, slot, MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr):
    """The slot's rank in slice s; 0 for slot -1 and for one that cannot be."""
    possible = (slot >= 0) & (slot < MAX_LORAS)
    return tl.minimum(tl.load(ranks + s * MAX_LORAS + slot, mask=possible, other=0), MAX_RANK)


@triton.jit
def load_b(b, b_stride, r, n, rank, width):
    """[ranks, columns] of one slot; n may be any columns, `rank` and `width` end what is read."""
    valid = (r < rank)[:, None] & (n < width)[None, :]
    return tl.load(b + r[:, None] * b_stride + n[None, :], mask=valid, other=0.0)


@triton.jit
def load_h(
    h, s, start, count, r, rank, num_rows,
    SLICES: tl.constexpr, SPLIT: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of shrink's splits, in their order: [ranks] for one row, else [ROWS, ranks]."""
    base = h + (tl.cast(s, tl.int64) * num_rows + start) * MAX_RANK
    split_stride = tl.cast(SLICES, tl.int64) * num_rows * MAX_RANK
    if ROWS == 1:
        places = base + r
        valid = r < rank
    else:
        place = tl.arange(0, ROWS)
        places = base + place[:, None] * MAX_RANK + r[None, :]
        valid = (place < count)[:, None] & (r < rank)[None, :]
    total = tl.load(places, mask=valid, other=0.0)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(places + i * split_stride, mask=valid, other=0.0)
    return total


@triton.jit
def add_product(acc, h, b, ROWS: tl.constexpr):
    """acc += h @ b; acc is [columns] for one row, else [ROWS, columns]."""
    if ROWS == 1:
        return acc + tl.sum(h[:, None] * b.to(tl.float32), 0)
    else:
        return tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit
def delta(
    h_tile, b_tile, h, b, b_stride, s, start, count, n, rank, width, num_rows,
    SLICES: tl.constexpr, SPLIT: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h @ B over the columns n, float32. The first BLOCK_RANK ranks are given; most adapters have no more."""
    acc = tl.zeros([BLOCK_N] if ROWS == 1 else [ROWS, BLOCK_N], dtype=tl.float32)
    acc = add_product(acc, h_tile, b_tile, ROWS)
    for block in range(BLOCK_RANK, rank, BLOCK_RANK):
        r = block + tl.arange(0, BLOCK_RANK)
        more = load_h(h, s, start, count, r, rank, num_rows, SLICES, SPLIT, MAX_RANK, ROWS)
        acc = add_product(acc, more, load_b(b, b_stride, r, n, rank, width), ROWS)
    return acc
