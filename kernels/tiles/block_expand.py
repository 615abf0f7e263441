"""Expand over blocks, from rank space back into columns: bfloat16, float16, float32 or FP8 weights."""

import triton
import triton.language as tl

from kernels.tiles.block_tile import (
    begin,
    load_block,
    load_ids,
    places_from,
    rows_by,
    table_entry,
    times_columns,
    times_rows,
    valid_by,
    wait_if_early,
)
from kernels.tiles.device import of_slice
from kernels.tiles.fp8_tile import as_type


@triton.jit
def load_b(b, b_stride, r, n, rank, width):
    """[ranks, columns] of one slot and expert; `rank` and `width` end what is read."""
    valid = (r < rank)[:, None] & (n < width)[None, :]
    return tl.load(b + r[:, None] * b_stride + n[None, :], mask=valid, other=0.0)


@triton.jit
def expand_product(h, b, like, ROWS: tl.constexpr, W8A8: tl.constexpr):
    """h @ b, float32: [columns] for one row, else [ROWS, columns]. `like` has the type of the activations."""
    dtype: tl.constexpr = like.dtype.element_ty
    if ROWS == 1:
        return tl.sum(h.to(tl.float32)[:, None] * b.to(tl.float32), 0)
    elif W8A8:
        # float16 holds every FP8 value, and its products take B as it lies; those of FP8 want it transposed.
        return tl.dot(h.to(tl.float16), as_type(b, tl.float16))
    else:
        return tl.dot(h.to(dtype), as_type(b, dtype), input_precision="ieee")


@triton.jit
def _load_h(
    h, base, places, r, valid, split_stride,
    SPLIT: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of shrink's splits, in their order: [ranks] for one row, else [ROWS, ranks]."""
    at = h + base + rows_by(places, r, MAX_RANK, ROWS)
    total = tl.load(at, mask=valid, other=0.0)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(at + i * split_stride, mask=valid, other=0.0)
    return total


@triton.jit
def _delta(
    h, h_scales, b_tile, factors, base, places, block, rank, count, s, num_places, scale_k, split_stride,
    like,
    K_SCALED: tl.constexpr, GROUP_K: tl.constexpr, ALIKE: tl.constexpr, W8A8: tl.constexpr,
    SPLIT: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """The product of one tile of ranks, from `block` on, with the scales that hold for these ranks alone."""
    r = block + tl.arange(0, BLOCK_RANK)
    valid = valid_by(count, r < rank, ROWS)
    h_tile = _load_h(h, base, places, r, valid, split_stride, SPLIT, MAX_RANK, ROWS)
    if W8A8:
        # Loaded before the product: behind it, it would wait for h first.
        GROUPS: tl.constexpr = (MAX_RANK + BLOCK_RANK - 1) // BLOCK_RANK
        of_row = h_scales + (s.to(tl.int64) * num_places + places) * GROUPS + block // BLOCK_RANK
        if ROWS == 1:
            row_factor = tl.load(of_row, mask=block < rank, other=0.0)
        else:
            there = tl.arange(0, ROWS) < tl.where(block < rank, count, 0)
            row_factor = tl.load(of_row, mask=there, other=0.0)
    product = expand_product(h_tile, b_tile, like, ROWS, W8A8)
    if W8A8:
        product = times_rows(product, row_factor, ROWS)
    if K_SCALED:
        product = times_columns(product, tl.load(factors + block // GROUP_K * scale_k), ROWS, ALIKE)
    return product


@triton.jit(do_not_specialize=["num_places", "known"])
def block_expand_kernel(
    y, h, h_scales, b0, b1, b2, b_scales0, b_scales1, b_scales2, ranks, routed, work, ids, row_slots,
    expert_map, num_places, known, y_stride, slot_stride, expert_stride0, expert_stride1, expert_stride2,
    b_stride0, b_stride1, b_stride2, ranks_s, ranks_l, ranks_e, scale_slot0, scale_slot1, scale_slot2,
    scale_expert0, scale_expert1, scale_expert2, scale_k0, scale_k1, scale_k2,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_EXPERTS: tl.constexpr, MAX_RANK: tl.constexpr,
    TOPK: tl.constexpr, KIND: tl.constexpr, HAS_MAP: tl.constexpr, SCALED: tl.constexpr,
    K_SCALED: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, W8A8: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr, ADD_INPUTS: tl.constexpr, ROUTED: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, block); the tiles of all slices follow each other.

    W8A8: h is FP8 with h_scales [slices, places, groups of BLOCK_RANK ranks]. K_SCALED: b's scales change
    with the rank too, every GROUP_K of them, a multiple of BLOCK_RANK. VECTOR: most columns that a thread
    takes side by side; where these times the threads are a tile, sums over ranks stay within a thread.
    """
    begin(PDL, EARLY)
    tile, index = tl.program_id(0), tl.program_id(1)
    slot, expert, start, count = load_block(
        work, row_slots, expert_map, index, num_places, known, MAX_LORAS, NUM_EXPERTS, TOPK, KIND, HAS_MAP
    )
    TILES0: tl.constexpr = (WIDTH0 + BLOCK_N - 1) // BLOCK_N
    TILES1: tl.constexpr = TILES0 + (WIDTH1 + BLOCK_N - 1) // BLOCK_N
    s = (tile >= TILES0).to(tl.int32) + (tile >= TILES1).to(tl.int32)
    n = (tile - of_slice(s, 0, TILES0, TILES1, 3)) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.max_contiguous(n, VECTOR)
    width = of_slice(s, WIDTH0, WIDTH1, WIDTH2, 3)
    # Before anything is known of the rank: that way fewer loads wait for each other.
    pairs = load_ids(ids, start, count, ROWS, KIND)
    rank = table_entry(ranks, s, slot, expert, ranks_s, ranks_l, ranks_e, count > 0, 0)
    rank = tl.minimum(rank, MAX_RANK)
    if (count == 0) | ((rank <= 0) & ADD_INPUTS):
        wait_if_early(PDL, EARLY)
        return

    b = of_slice(s, b0, b1, b2, SLICES) + slot.to(tl.int64) * slot_stride
    b += expert.to(tl.int64) * of_slice(s, expert_stride0, expert_stride1, expert_stride2, SLICES)
    b_stride = of_slice(s, b_stride0, b_stride1, b_stride2, SLICES)
    b_tile = load_b(b, b_stride, tl.arange(0, BLOCK_RANK), n, rank, width)
    factors = b_scales0
    scale_k = 0
    ALIKE: tl.constexpr = GROUP_N >= WIDTH0 and GROUP_N >= WIDTH1 and GROUP_N >= WIDTH2
    if SCALED:
        factors = of_slice(s, b_scales0, b_scales1, b_scales2, SLICES) + slot.to(tl.int64) * of_slice(
            s, scale_slot0, scale_slot1, scale_slot2, SLICES
        )
        factors += expert.to(tl.int64) * of_slice(s, scale_expert0, scale_expert1, scale_expert2, SLICES)
        if not ALIKE:
            factors += tl.minimum(n, width - 1) // GROUP_N
        scale_k = of_slice(s, scale_k0, scale_k1, scale_k2, SLICES)
    if SCALED and not K_SCALED:
        factor = tl.load(factors)
    wait_if_early(PDL, EARLY)

    at = y + rows_by(pairs, of_slice(s, START0, START1, START2, SLICES) + n, y_stride, ROWS)
    valid = valid_by(count, n < width, ROWS)
    if ADD_INPUTS:
        before = tl.load(at, mask=valid, other=0.0)
    places = places_from(start, ROWS)
    base = s.to(tl.int64) * num_places * MAX_RANK
    split_stride = tl.cast(SLICES, tl.int64) * num_places * MAX_RANK
    acc = _delta(
        h, h_scales, b_tile, factors, base, places, 0, rank, count, s, num_places, scale_k, split_stride, y,
        K_SCALED, GROUP_K, ALIKE, W8A8, SPLIT, MAX_RANK, ROWS, BLOCK_RANK,
    )  # fmt: skip
    # Most adapters have no more ranks than the first tile.
    for block in range(BLOCK_RANK, rank, BLOCK_RANK):
        more = load_b(b, b_stride, block + tl.arange(0, BLOCK_RANK), n, rank, width)
        acc += _delta(
            h, h_scales, more, factors, base, places, block, rank, count, s, num_places, scale_k,
            split_stride, y, K_SCALED, GROUP_K, ALIKE, W8A8, SPLIT, MAX_RANK, ROWS, BLOCK_RANK,
        )  # fmt: skip
    if SCALED and not K_SCALED:
        acc = times_columns(acc, factor, ROWS, ALIKE)
    if ROUTED:
        if ROWS == 1:
            acc *= tl.load(routed + pairs).to(tl.float32)
        else:
            weights = tl.load(routed + pairs, mask=tl.arange(0, ROWS) < count, other=0.0)
            acc = times_rows(acc, weights.to(tl.float32), ROWS)
    if ADD_INPUTS:
        acc += before.to(tl.float32)
    tl.store(at, acc.to(y.dtype.element_ty), mask=valid)
