"""Pieces of vLLM's expert kernels: where a block comes from, and the two products. It needs triton."""

import triton
import triton.language as tl

from kernels.tiles.block_tile import columns_of, rows_by, times_columns, times_rows
from kernels.tiles.fp8_tile import as_type


@triton.jit
def load_block(
    index, expert_ids, sorted_ids, post_pad, lora_ids, adapter_enabled, row_slots, lists, num_pairs,
    num_places, num_blocks,
    MAX_LORAS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, LISTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(slot, expert, first place, int64 pairs, which are there, whether any is) of the index-th block.

    ROWS 1: every pair is a block. Else the blocks of all lists follow each other, cut into parts of ROWS
    places, which is how few programs find nothing to do: a list has room for blocks that other lists have.
    """
    if ROWS == 1:
        place = index
        slot = tl.load(row_slots + index // TOPK)
        expert = tl.load(expert_ids + index)
        possible = (slot >= 0) & (slot < MAX_LORAS)
        enabled = tl.load(adapter_enabled + slot, mask=possible, other=0)
        possible = possible & (enabled != 0)
        pairs = index.to(tl.int64)
    else:
        PARTS: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
        number = tl.arange(0, LISTS)
        slots = tl.load(lora_ids + number, mask=number < lists, other=-1)
        possible = (slots >= 0) & (slots < MAX_LORAS)
        enabled = tl.load(adapter_enabled + slots, mask=possible, other=0)
        padded = tl.load(post_pad + slots, mask=possible & (enabled != 0), other=0)
        blocks = tl.cdiv(padded, BLOCK)
        block = index // PARTS
        before = tl.cumsum(blocks, 0) <= block
        list_ = tl.sum(before.to(tl.int32), 0)
        block = block - tl.sum(tl.where(before, blocks, 0), 0)
        possible = (list_ < LISTS) & (block < num_blocks)
        slot = tl.sum(tl.where(number == list_, slots, 0), 0)
        expert = tl.load(expert_ids + slot.to(tl.int64) * num_blocks + block, mask=possible, other=-1)
        within = index % PARTS * ROWS + tl.arange(0, ROWS)
        place = block * BLOCK + index % PARTS * ROWS
        at = block * BLOCK + within
        valid = (within < BLOCK) & (at < tl.where(possible, num_places, 0))
        pairs = tl.load(sorted_ids + slot.to(tl.int64) * num_places + at, mask=valid, other=num_pairs)
        pairs = pairs.to(tl.int64)
    possible = possible & (expert >= 0) & (expert < NUM_EXPERTS)
    there = (pairs >= 0) & (pairs < tl.where(possible, num_pairs, 0))
    some = there if ROWS == 1 else tl.max(there.to(tl.int32), 0) > 0
    return slot, expert.to(tl.int32), place, tl.where(there, pairs, 0), there, some


@triton.jit
def valid_columns(there, columns_valid, ROWS: tl.constexpr):
    """Which columns of which rows are: one row is always there, or its program has ended."""
    if ROWS == 1:
        return columns_valid
    else:
        return there[:, None] & columns_valid[None, :]


@triton.jit
def shrunk(
    x_rows, there, a, r, a_stride, x_scales, x_scale_k, a_scales, a_scale_k, split,
    K: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, SCALED: tl.constexpr, K_SCALED: tl.constexpr, X_SCALED: tl.constexpr,
    GROUP_K: tl.constexpr,
):  # fmt: skip
    """x @ a.T over every SPLIT-th step of K, float32: [ranks] for one row, else [ROWS, ranks].

    a_scales points to each rank's scale; K_SCALED: it, and the row's, change every GROUP_K inputs.
    """
    a_rows = a + (r * a_stride)[:, None]
    if ROWS == 1:
        # Products are summed over the steps first, and across the tile only once.
        acc = tl.zeros([BLOCK_RANK, BLOCK_K], dtype=tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_RANK], dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K * SPLIT)):
        k = (step * SPLIT + split) * BLOCK_K + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a_rows + k[None, :], mask=(r < RANK)[:, None] & (k < K)[None, :], other=0.0)
        x_tile = tl.load(columns_of(x_rows, k, ROWS), mask=valid_columns(there, k < K, ROWS), other=0.0)
        group = tl.minimum((step * SPLIT + split) * BLOCK_K, K - 1) // GROUP_K
        if ROWS == 1:
            product = a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :]
            if K_SCALED:
                product *= tl.load(a_scales + group * a_scale_k)[:, None]
                if X_SCALED:
                    product *= tl.load(x_scales + group * x_scale_k)
            acc += product
        elif K_SCALED:
            product = tl.dot(x_tile, tl.trans(as_type(a_tile, x_tile.dtype)), input_precision="ieee")
            product *= tl.load(a_scales + group * a_scale_k)[None, :]
            if X_SCALED:
                product *= tl.load(x_scales + group * x_scale_k)[:, None]
            acc += product
        else:
            acc = tl.dot(x_tile, tl.trans(as_type(a_tile, x_tile.dtype)), acc, input_precision="ieee")
    total = tl.sum(acc, 1) if ROWS == 1 else acc
    if SCALED and not K_SCALED:
        total = times_columns(total, tl.load(a_scales), ROWS, False)
    if X_SCALED and not K_SCALED:
        total = times_rows(total, tl.load(x_scales), ROWS)
    return total


@triton.jit
def load_b(b, b_stride, r, n, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """[columns, ranks] of one slot and expert, as they lie: ranks innermost."""
    valid = (n < WIDTH)[:, None] & (r < RANK)[None, :]
    return tl.load(b + n[:, None] * b_stride + r[None, :], mask=valid, other=0.0)


@triton.jit
def expanded(h, b_tile, like, ROWS: tl.constexpr):
    """h @ b.T, float32: [columns] for one row, else [ROWS, columns], of h rounded to `like`'s type."""
    dtype: tl.constexpr = like.dtype.element_ty
    if ROWS == 1:
        return tl.sum(b_tile.to(tl.float32) * h[None, :].to(tl.float32), 1)
    else:
        return tl.dot(h.to(dtype), tl.trans(as_type(b_tile, dtype)), input_precision="ieee")


@triton.jit
def times_routed(delta, routed, pairs, there, ROWS: tl.constexpr):
    """Times the router's weight of each pair."""
    weights = tl.load(routed + pairs, mask=there, other=0.0)
    return times_rows(delta, weights.to(tl.float32), ROWS)


@triton.jit
def add_columns(
    y, delta, pairs, there, start, n, y_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """Adds the delta to y, or puts it there; y is rounded once."""
    at = y + rows_by(pairs, start + n, y_stride, ROWS)
    valid = valid_columns(there, n < WIDTH, ROWS)
    if ADD:
        delta += tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, delta.to(y.dtype.element_ty), mask=valid)
