"""Per-expert LoRA in one launch: a program shrinks its rows and expands them at once. Needs triton."""

import triton
import triton.language as tl

from kernels.tiles.block_expand import expand_product, load_b
from kernels.tiles.block_tile import (
    begin,
    columns_of,
    load_block,
    load_ids,
    rows_by,
    table_entry,
    times_rows,
    valid_by,
)
from kernels.tiles.device import of_slice
from kernels.tiles.fp8_tile import as_type


@triton.jit
def _shrunk(
    x_rows, a, rank, count, rank_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x @ a.T, float32: [ranks] for one row, else [ROWS, ranks]."""
    r = tl.arange(0, BLOCK_RANK)
    a_rows = a + (r * rank_stride)[:, None]
    if ROWS == 1:
        # Products are summed over the steps first, and across the tile only once.
        acc = tl.zeros([BLOCK_RANK, BLOCK_K], dtype=tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_RANK], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0)
        x_tile = tl.load(columns_of(x_rows, k, ROWS), mask=valid_by(count, k < K, ROWS), other=0.0)
        if ROWS == 1:
            acc += a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :]
        else:
            acc = tl.dot(x_tile, tl.trans(as_type(a_tile, x_tile.dtype)), acc, input_precision="ieee")
    if ROWS == 1:
        return tl.sum(acc, 1)
    else:
        return acc


@triton.jit
def _add_columns(
    y, h, b_tile, pairs, n, count, width, column_start, y_stride,
    ROWS: tl.constexpr, ADD_INPUTS: tl.constexpr,
):  # fmt: skip
    delta = expand_product(h, b_tile, y, ROWS, False)
    at = y + rows_by(pairs, column_start + n, y_stride, ROWS)
    valid = valid_by(count, n < width, ROWS)
    if ADD_INPUTS:
        delta += tl.load(at, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, delta.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_places", "known"])
def fused_moe_lora_once_kernel(
    y, x, a, b0, b1, b2, ranks, scales, routed, work, ids, row_slots, expert_map,
    num_places, known, y_stride, x_stride, a_slot_stride, a_expert_stride, a_stride, offset1, offset2,
    b_slot_stride, b_expert_stride0, b_expert_stride1, b_expert_stride2, b_stride0, b_stride1, b_stride2,
    ranks_s, ranks_l, ranks_e, scales_s, scales_l, scales_e,
    K: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_EXPERTS: tl.constexpr, MAX_RANK: tl.constexpr,
    TOPK: tl.constexpr, DIVIDE: tl.constexpr, KIND: tl.constexpr, HAS_MAP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, COLUMN_STAGES: tl.constexpr,
    ADD_INPUTS: tl.constexpr, ROUTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, slice, block): one shrunk block serves every chunks-th tile of BLOCK_N columns.

    BLOCK_RANK holds every rank. Chunks repeat the shrink: they pay where blocks are few.
    """
    chunks = tl.num_programs(0)
    begin(PDL, False)
    chunk, s, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, expert, start, count = load_block(
        work, row_slots, expert_map, index, num_places, known, MAX_LORAS, NUM_EXPERTS, TOPK, KIND, HAS_MAP
    )
    rank = table_entry(ranks, s, slot, expert, ranks_s, ranks_l, ranks_e, count > 0, 0)
    rank = tl.minimum(rank, MAX_RANK)
    if (count == 0) | ((rank <= 0) & ADD_INPUTS):
        return
    second, third = (s == 1).to(tl.int64), (s == 2).to(tl.int64)
    a += slot.to(tl.int64) * a_slot_stride + expert.to(tl.int64) * a_expert_stride
    a += second * offset1 + third * offset2
    b = of_slice(s, b0, b1, b2, SLICES) + slot.to(tl.int64) * b_slot_stride
    b += expert.to(tl.int64) * of_slice(s, b_expert_stride0, b_expert_stride1, b_expert_stride2, SLICES)
    b_stride = of_slice(s, b_stride0, b_stride1, b_stride2, SLICES)
    width = of_slice(s, WIDTH0, WIDTH1, WIDTH2, SLICES)
    column_start = of_slice(s, START0, START1, START2, SLICES)
    pairs = load_ids(ids, start, count, ROWS, KIND)
    factor = table_entry(scales, s, slot, expert, scales_s, scales_l, scales_e, count > 0, 0.0)
    # B's first tile is on its way beside A.
    r, n = tl.arange(0, BLOCK_RANK), chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    b_tile = load_b(b, b_stride, r, n, rank, width)
    h = (
        _shrunk(x + pairs // DIVIDE * x_stride, a, rank, count, a_stride, K, ROWS, BLOCK_RANK, BLOCK_K)
        * factor
    )
    if ROUTED:
        if ROWS == 1:
            h *= tl.load(routed + pairs).to(tl.float32)
        else:
            weights = tl.load(routed + pairs, mask=tl.arange(0, ROWS) < count, other=0.0)
            h = times_rows(h, weights.to(tl.float32), ROWS)
    _add_columns(y, h, b_tile, pairs, n, count, width, column_start, y_stride, ROWS, ADD_INPUTS)
    step = chunks * BLOCK_N
    for first in tl.range(chunk * BLOCK_N + step, width, step, num_stages=COLUMN_STAGES):
        n = first + tl.arange(0, BLOCK_N)
        b_tile = load_b(b, b_stride, r, n, rank, width)
        _add_columns(y, h, b_tile, pairs, n, count, width, column_start, y_stride, ROWS, ADD_INPUTS)
