"""x @ A.T for rows of many adapters, from the reference API's description of a step. Needs triton."""

import triton
import triton.language as tl

from kernels.tiles.device import let_next_kernel_start, wait_for_former_kernel
from kernels.vllm.dense.groups import groups_of, load_entry, load_group, load_places, load_work


@triton.jit
def _load_a(a_rows, k, valid, K: tl.constexpr):
    return tl.load(a_rows[:, None] + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _one_row(
    h, x, a_rows, row, split, scale, limit, r,
    K: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h[row, r] of a row by itself, over the split's share of K."""
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_tile = _load_a(a_rows, k, r < limit, K)
    wait_for_former_kernel(PDL)
    if not EARLY:
        let_next_kernel_start(PDL)
    x_tile = tl.load(x + k, mask=k < K, other=0.0)
    acc = tl.sum(a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :], 1)
    for step in range(1, tl.cdiv(K, BLOCK_K * SPLIT)):
        k = (step * SPLIT + split) * BLOCK_K + tl.arange(0, BLOCK_K)
        a_tile = _load_a(a_rows, k, r < limit, K)
        x_tile = tl.load(x + k, mask=k < K, other=0.0)
        acc += tl.sum(a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :], 1)
    tl.store(h + row * MAX_RANK + r, (acc * scale).to(h.dtype.element_ty), mask=r < limit)


@triton.jit
def _group(
    h, x, a_rows, rows, mine, split, scale, limit, r, x_stride,
    K: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h[rows, r] of the rows that are `mine`, over the split's share of K."""
    x_rows = (x + rows * x_stride)[:, None]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_tile = _load_a(a_rows, k, r < limit, K)
    wait_for_former_kernel(PDL)
    if not EARLY:
        let_next_kernel_start(PDL)
    x_tile = tl.load(x_rows + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
    acc = tl.dot(x_tile, tl.trans(a_tile), acc, input_precision="ieee")
    for step in range(1, tl.cdiv(K, BLOCK_K * SPLIT)):
        k = (step * SPLIT + split) * BLOCK_K + tl.arange(0, BLOCK_K)
        a_tile = _load_a(a_rows, k, r < limit, K)
        x_tile = tl.load(x_rows + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(x_tile, tl.trans(a_tile), acc, input_precision="ieee")
    places = h + (rows * MAX_RANK)[:, None] + r[None, :]
    tl.store(places, (acc * scale).to(h.dtype.element_ty), mask=mine[:, None] & (r < limit)[None, :])


@triton.jit
def _columns(
    h, a, group, split, num_rows, offset1, offset2, rank_stride,
    SLICES: tl.constexpr, MAX_RANK: tl.constexpr, FUSED: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """(h, a's rows, ranks, how many of these there are) of a program's columns: (slice, rank) pairs."""
    column = tl.arange(0, FUSED * BLOCK_RANK)
    s = group % SLICES if FUSED == 1 else column // BLOCK_RANK
    r = column % BLOCK_RANK
    if MAX_RANK > BLOCK_RANK:
        r += (group // (SLICES if FUSED == 1 else 1)) * BLOCK_RANK
    # A product, not a choice of pointers: that way the compiler still knows that all are aligned.
    a_rows = a + r * rank_stride + (s == 1).to(tl.int64) * offset1 + (s == 2).to(tl.int64) * offset2
    h += tl.cast(split * SLICES + s, tl.int64) * num_rows * MAX_RANK
    return h, a_rows, r, tl.where(s < SLICES, MAX_RANK, 0)


@triton.jit(do_not_specialize=["num_rows", "scale"])
def shrink_members_kernel(
    h, x, a, order, counts, starts, lora_ids, work, scale,
    num_rows, x_stride, slot_stride, rank_stride, offset1, offset2,
    K: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr,
    LANES: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr, ALONE_K: tl.constexpr, SPLIT: tl.constexpr, ROWS_A_SLOT: tl.constexpr,
    TOLD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, columns, entry): a row, or a team, over a share of K.

    TOLD: so many entries `work` has, which says what each is; 0: the program finds out.
    h is [splits, slices, num_rows, MAX_RANK] in the order of the rows; those without an adapter stay.
    EARLY: the next kernel starts with this one; else, once all that was before this one is done, so that it
    may read what this one reads without waiting.
    """
    if EARLY:
        let_next_kernel_start(PDL)
    split, group, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if TOLD:
        slot, first, members, number, row = load_work(work, entry, TOLD)
        members = tl.where(number == 0, members, 0)
    else:
        slot, first, members = load_entry(
            counts, starts, lora_ids, entry, num_rows, MAX_LORAS, NUM_IDS, LANES, ROWS, ROWS_A_SLOT
        )
        row = tl.load(order + first, mask=members == 1, other=0).to(tl.int64)
    if (members == 0) | (slot < 0):
        wait_for_former_kernel(PDL)
        return
    a += slot.to(tl.int64) * slot_stride
    h, a_rows, r, limit = _columns(
        h, a, group, split, num_rows, offset1, offset2, rank_stride, SLICES, MAX_RANK, 1, BLOCK_RANK
    )
    if members == 1:
        _one_row(
            h, x + row * x_stride, a_rows, row, split, scale, limit, r, K, MAX_RANK, ALONE_K, SPLIT, EARLY,
            PDL,
        )  # fmt: skip
    else:
        rows, mine = load_places(order, first, first, first + members, ROWS)
        _group(
            h, x, a_rows, rows, mine, split, scale, limit, r, x_stride, K, MAX_RANK, ROWS, BLOCK_RANK,
            BLOCK_K, SPLIT, EARLY, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "scale"])
def shrink_tiles_kernel(
    h, x, a, order, counts, starts, lora_ids, scale,
    num_rows, x_stride, slot_stride, rank_stride, offset1, offset2,
    K: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr,
    LANES: tl.constexpr, MAX_RANK: tl.constexpr, FUSED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, columns, tile): a tile's groups times FUSED slices, over a share of K."""
    let_next_kernel_start(PDL)
    split, group, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_group, num_groups = groups_of(counts, starts, tile * ROWS, ROWS, NUM_IDS, LANES)
    h, a_rows, r, limit = _columns(
        h, a, group, split, num_rows, offset1, offset2, rank_stride, SLICES, MAX_RANK, FUSED, BLOCK_RANK
    )
    for i in range(num_groups):
        slot, start, count = load_group(
            counts, starts, lora_ids, first_group + i, num_rows, MAX_LORAS, NUM_IDS
        )
        rows, mine = load_places(order, tile * ROWS, start, start + count, ROWS)
        if slot >= 0:
            _group(
                h, x, a_rows + slot.to(tl.int64) * slot_stride, rows, mine, split, scale, limit, r,
                x_stride, K, MAX_RANK, ROWS, FUSED * BLOCK_RANK, BLOCK_K, SPLIT, True, PDL,
            )  # fmt: skip
    wait_for_former_kernel(PDL)
