"""Shrink over blocks, from rows into rank space: bfloat16, float16, float32 or FP8 weights."""

import triton
import triton.language as tl

from kernels.tiles.block_tile import (
    begin,
    columns_of,
    load_block,
    load_ids,
    places_from,
    rows_by,
    table_entry,
    times_columns,
    times_rows,
    valid_by,
    wait_if_early,
    zeros_of,
)
from kernels.tiles.fp8_tile import as_type


@triton.jit
def _load_a(a, r, valid, k, rank_stride, K: tl.constexpr):
    places = (a + r * rank_stride)[:, None] + k[None, :]
    return tl.load(places, mask=valid[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _product(x, a, ROWS: tl.constexpr):
    """x @ a.T, float32: [columns] for one-row blocks, else [ROWS, columns]."""
    if ROWS == 1:
        return tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    else:
        return tl.dot(x, tl.trans(as_type(a, x.dtype)), input_precision="ieee")


@triton.jit
def _step(
    x_rows, a_tile, x_scales, a_scales, k, count, x_group_stride,
    K: tl.constexpr, ROWS: tl.constexpr, K_SCALED: tl.constexpr, GROUP_K: tl.constexpr,
    X_SCALED: tl.constexpr,
):  # fmt: skip
    """One step of K: its product, with the scales of its group of inputs where they change with the group."""
    x_tile = tl.load(columns_of(x_rows, k, ROWS), mask=valid_by(count, k < K, ROWS), other=0.0)
    product = _product(x_tile, a_tile, ROWS)
    if K_SCALED:
        group = tl.min(k, 0) // GROUP_K
        product = times_columns(product, tl.load(a_scales + group), ROWS, False)
        if X_SCALED:
            product = times_rows(product, tl.load(x_scales + group * x_group_stride), ROWS)
    return product


@triton.jit
def _add_steps(
    acc, x_rows, a, r, rank, x_scales, factors, split, count, rank_stride, x_group_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, K_SCALED: tl.constexpr,
    GROUP_K: tl.constexpr, X_SCALED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    for step in range(FIRST, tl.cdiv(K, BLOCK_K * SPLIT)):
        k = (step * SPLIT + split) * BLOCK_K + tl.arange(0, BLOCK_K)
        a_tile = _load_a(a, r, r < rank, k, rank_stride, K)
        acc += _step(
            x_rows, a_tile, x_scales, factors, k, count, x_group_stride, K, ROWS, K_SCALED, GROUP_K, X_SCALED
        )
    return acc


@triton.jit
def _scaled(
    acc, of_rows, of_columns, ROWS: tl.constexpr, SCALED: tl.constexpr, K_SCALED: tl.constexpr,
    X_SCALED: tl.constexpr,
):  # fmt: skip
    """Times the scales that hold for all of K."""
    if SCALED and not K_SCALED:
        acc = times_columns(acc, of_columns, ROWS, False)
    if X_SCALED and not K_SCALED:
        acc = times_rows(acc, of_rows, ROWS)
    return acc


@triton.jit
def _places(s, start, r, num_places, MAX_RANK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets into [slices, num_places, MAX_RANK]."""
    return rows_by(places_from(start, ROWS), s.to(tl.int64) * num_places * MAX_RANK + r, MAX_RANK, ROWS)


@triton.jit
def _store(
    total, h, h_scales, s, start, count, group, block, r, rank, num_places,
    SLICES: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, FUSED: tl.constexpr,
    BLOCK_RANK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One tile of h; with LARGEST as FP8, every BLOCK_RANK ranks of a row and slice with their own scale.

    h_scales is [slices, places, groups].
    """
    places, valid = _places(s, start, r, num_places, MAX_RANK, ROWS), valid_by(count, r < rank, ROWS)
    if LARGEST == 0:
        tl.store(h + places, total, mask=valid)
    else:
        parts = tl.reshape(tl.where(valid, total, 0.0), [ROWS * FUSED, BLOCK_RANK])
        largest = tl.max(tl.abs(parts), 1)
        factor = tl.where(largest > 0, largest / LARGEST, 1.0)
        values = tl.reshape(parts / factor[:, None], total.shape)
        tl.store(h + places, values.to(h.dtype.element_ty), mask=valid)
        GROUPS: tl.constexpr = (MAX_RANK + BLOCK_RANK - 1) // BLOCK_RANK
        of_slice = group + tl.arange(0, FUSED)
        base = of_slice.to(tl.int64) * num_places * GROUPS + block // BLOCK_RANK
        at = rows_by(places_from(start, ROWS), base, GROUPS, ROWS)
        there = valid_by(count, of_slice < SLICES, ROWS)
        tl.store(h_scales + at, tl.reshape(factor, at.shape), mask=there)


@triton.jit(do_not_specialize=["num_places", "known"])
def block_shrink_kernel(
    h, h_scales, partials, x, x_scales, a, a_scales, ranks, scales, work, ids, row_slots, expert_map,
    finished, num_places, known, x_stride, slot_stride, expert_stride, rank_stride, offset1, offset2,
    ranks_s, ranks_l, ranks_e, scales_s, scales_l, scales_e,
    x_scale_stride, x_group_stride, a_scale_slot, a_scale_expert, a_scale_n, a_scale_offset1, a_scale_offset2,
    K: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    MAX_RANK: tl.constexpr, TOPK: tl.constexpr, DIVIDE: tl.constexpr, KIND: tl.constexpr,
    HAS_MAP: tl.constexpr, SCALED: tl.constexpr, K_SCALED: tl.constexpr, X_SCALED: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, LARGEST: tl.constexpr, FUSED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    FINALISE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, group, block): a block's rows times the ranks of FUSED slices, over its share of K.

    Columns are (slice, rank) pairs. h is [slices, places, ranks] (with LARGEST: FP8 and a scale per row,
    slice and BLOCK_RANK ranks). The partial sums go to h[split] when expand adds them up; with FINALISE to
    `partials`, and the block's last program adds them in the order of the splits: equal bits every time.
    DIVIDE: pairs that share a row of x.
    """
    begin(PDL, EARLY)
    split, group, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, expert, start, count = load_block(
        work, row_slots, expert_map, index, num_places, known, MAX_LORAS, NUM_EXPERTS, TOPK, KIND, HAS_MAP
    )
    column = tl.arange(0, FUSED * BLOCK_RANK)
    s = group if FUSED == 1 else column // BLOCK_RANK
    there = s < tl.where(count > 0, SLICES, 0)
    # Before anything is known of the rank: that way fewer loads wait for each other.
    rows = load_ids(ids, start, count, ROWS, KIND) // DIVIDE
    rank = table_entry(ranks, s, slot, expert, ranks_s, ranks_l, ranks_e, there, 0)
    rank = tl.minimum(rank, MAX_RANK)
    highest = rank if FUSED == 1 else tl.max(rank, 0)
    if highest <= 0:
        wait_if_early(PDL, EARLY)
        return

    r = column % BLOCK_RANK
    # Products, not choices of pointers: that way the compiler still knows that all are aligned.
    second, third = (s == 1).to(tl.int64), (s == 2).to(tl.int64)
    a += slot.to(tl.int64) * slot_stride + expert.to(tl.int64) * expert_stride
    a += second * offset1 + third * offset2
    a_scales += slot.to(tl.int64) * a_scale_slot + expert.to(tl.int64) * a_scale_expert
    a_scales += second * a_scale_offset1 + third * a_scale_offset2
    scale = table_entry(scales, s, slot, expert, scales_s, scales_l, scales_e, there, 0.0)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_tile = _load_a(a, r, r < rank, k, rank_stride, K)
    factors = a_scales + tl.minimum(r, MAX_RANK - 1) // GROUP_N * a_scale_n
    of_rows, of_columns = 1.0, 1.0
    if SCALED and not K_SCALED:
        of_columns = tl.load(factors)
    wait_if_early(PDL, EARLY)

    x_rows = x + rows * x_stride
    x_scales += rows * x_scale_stride
    if X_SCALED and not K_SCALED:
        of_rows = tl.load(x_scales)
    split_stride = tl.cast(SLICES, tl.int64) * num_places * MAX_RANK
    out = h
    if FINALISE:
        out = partials
    if LARGEST == 0 or FINALISE:
        out += split * split_stride
    acc = _step(
        x_rows, a_tile, x_scales, factors, k, count, x_group_stride, K, ROWS, K_SCALED, GROUP_K, X_SCALED
    )
    acc = _add_steps(
        acc, x_rows, a, r, rank, x_scales, factors, split, count, rank_stride, x_group_stride, K, ROWS,
        BLOCK_K, SPLIT, K_SCALED, GROUP_K, X_SCALED, 1,
    )  # fmt: skip
    acc = _scaled(acc, of_rows, of_columns, ROWS, SCALED, K_SCALED, X_SCALED)
    factor = 1.0 if FINALISE else scale
    _store(
        acc * factor, out, h_scales, s, start, count, group, 0, r, rank, num_places, SLICES, MAX_RANK, ROWS,
        FUSED, BLOCK_RANK, 0 if FINALISE else LARGEST,
    )  # fmt: skip
    # Most adapters have no more ranks than the first tile.
    for block in range(BLOCK_RANK, highest, BLOCK_RANK):
        r = block + column % BLOCK_RANK
        factors = a_scales + tl.minimum(r, MAX_RANK - 1) // GROUP_N * a_scale_n
        acc = _add_steps(
            zeros_of(ROWS, FUSED * BLOCK_RANK), x_rows, a, r, rank, x_scales, factors, split, count,
            rank_stride, x_group_stride, K, ROWS, BLOCK_K, SPLIT, K_SCALED, GROUP_K, X_SCALED, 0,
        )  # fmt: skip
        if SCALED and not K_SCALED:
            of_columns = tl.load(factors)
        acc = _scaled(acc, of_rows, of_columns, ROWS, SCALED, K_SCALED, X_SCALED)
        _store(
            acc * factor, out, h_scales, s, start, count, group, block, r, rank, num_places, SLICES, MAX_RANK,
            ROWS, FUSED, BLOCK_RANK, 0 if FINALISE else LARGEST,
        )  # fmt: skip
    if FINALISE:
        counter = finished + index * tl.num_programs(1) + group
        tl.debug_barrier()  # all of this program's partials are stored before it counts itself
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(counter, 0)
            for block in range(0, highest, BLOCK_RANK):
                r = block + column % BLOCK_RANK
                places, valid = (
                    _places(s, start, r, num_places, MAX_RANK, ROWS),
                    valid_by(count, r < rank, ROWS),
                )
                total = zeros_of(ROWS, FUSED * BLOCK_RANK)
                for i in tl.static_range(SPLIT):
                    part = partials + i * split_stride + places
                    # .cg: past the first-level cache, which does not see other programs' stores.
                    total += tl.load(part, mask=valid, other=0.0, cache_modifier=".cg")
                _store(
                    total * scale, h, h_scales, s, start, count, group, block, r, rank, num_places, SLICES,
                    MAX_RANK, ROWS, FUSED, BLOCK_RANK, LARGEST,
                )  # fmt: skip
