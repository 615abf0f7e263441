"""Shrink and expand with FP8 weights, from the reference API's description of a step. Needs triton.

Both types of FP8 fit float16 and bfloat16 exactly: products of FP8 rows are those of float16 values, so their
sums are float32, where FP8 instructions would keep fewer bits.
"""

import triton
import triton.language as tl

from kernels.tiles.device import of_slice
from kernels.tiles.fp8_tile import as_type
from kernels.vllm.dense.groups import groups_of, load_group, load_member, load_places


@triton.jit
def _aligned(pointer, ALIGNED: tl.constexpr):
    if ALIGNED:  # a choice of pointers hides it from the compiler
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _add_product(
    acc, left, right, left_scales, right_scales,
    DTYPE: tl.constexpr, K_SCALED: tl.constexpr, LEFT_SCALED: tl.constexpr,
):  # fmt: skip
    """acc + left @ right.T, multiplied in DTYPE. K_SCALED: times the scales of this step along K."""
    left_tile, right_tile = as_type(left, DTYPE), tl.trans(as_type(right, DTYPE))
    if K_SCALED:
        product = tl.dot(left_tile, right_tile, input_precision="ieee") * tl.load(right_scales)[None, :]
        if LEFT_SCALED:
            product *= tl.load(left_scales)[:, None]
        acc += product
    else:
        acc = tl.dot(left_tile, right_tile, acc, input_precision="ieee")
    return acc


@triton.jit
def _times_scales(
    acc, left_scales, right_scales, K_SCALED: tl.constexpr, LEFT_SCALED: tl.constexpr
):  # fmt: skip
    """What has one scale for all of K gets it at the end."""
    if not K_SCALED:
        acc *= tl.load(right_scales)[None, :]
        if LEFT_SCALED:
            acc *= tl.load(left_scales)[:, None]
    return acc


@triton.jit
def _shrink_rows(
    h, x, a, x_scales, a_scales, rows, mine, r, split, scale, x_stride, rank_stride, x_scale_stride,
    x_scale_k,
    K: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, GROUP_K: tl.constexpr, K_SCALED: tl.constexpr, X_SCALED: tl.constexpr,
):  # fmt: skip
    """h[rows, r] of the rows that are `mine`, over the split's share of K."""
    FP8: tl.constexpr = x.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.float16 if FP8 else x.dtype.element_ty
    x_rows, a_rows = (x + rows * x_stride)[:, None], (a + r * rank_stride)[:, None]
    row_scales = x_scales + rows * x_scale_stride
    acc = tl.zeros([ROWS, BLOCK_RANK], dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K * SPLIT)):
        first = (step * SPLIT + split) * BLOCK_K
        k = first + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a_rows + k[None, :], mask=(r < RANK)[:, None] & (k < K)[None, :], other=0.0)
        x_tile = tl.load(x_rows + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
        group = tl.minimum(first, K - 1) // GROUP_K
        acc = _add_product(
            acc, x_tile, a_tile, row_scales + group * x_scale_k, a_scales + group, DTYPE, K_SCALED, X_SCALED
        )
    acc = _times_scales(acc, row_scales, a_scales, K_SCALED, X_SCALED) * scale
    places = h + (rows * RANK)[:, None] + r[None, :]
    tl.store(places, acc.to(h.dtype.element_ty), mask=mine[:, None] & (r < RANK)[None, :])


@triton.jit(do_not_specialize=["num_rows", "scale"])
def shrink_fp8_kernel(
    h, x, a0, a1, a2, x_scales, a_scales0, a_scales1, a_scales2, order, counts, starts, lora_ids, scale,
    num_rows, x_stride, slot_stride, rank_stride, x_scale_stride, x_scale_k,
    K: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr,
    LANES: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, TEAMS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr, X_SCALED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program (split, slice and ranks, place): a team of rows of one slot, or a tile's groups.

    TEAMS: places are rows, and a team's first one works for all of it; else they are tiles of ROWS rows.
    h is [splits, slices, num_rows, RANK]; rows without an adapter stay.
    """
    split, columns, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, r = columns % SLICES, columns // SLICES * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    K_GROUPS: tl.constexpr = (K + GROUP_K - 1) // GROUP_K
    N_GROUPS: tl.constexpr = (RANK + GROUP_N - 1) // GROUP_N
    a = of_slice(s, a0, a1, a2, SLICES)
    a_scales = of_slice(s, a_scales0, a_scales1, a_scales2, SLICES)
    a_scales += tl.minimum(r, RANK - 1) // GROUP_N * K_GROUPS
    h += tl.cast(split * SLICES + s, tl.int64) * num_rows * RANK
    if TEAMS:
        slot, first, members, number = load_member(
            counts, starts, lora_ids, place, num_rows, MAX_LORAS, NUM_IDS, LANES, ROWS, 0
        )
        if (members > 0) & (number == 0) & (slot >= 0):
            rows, mine = load_places(order, first, first, first + members, ROWS)
            _shrink_rows(
                h, x, _aligned(a + slot.to(tl.int64) * slot_stride, ALIGNED), x_scales,
                a_scales + slot * (N_GROUPS * K_GROUPS), rows, mine, r, split, scale, x_stride, rank_stride,
                x_scale_stride, x_scale_k, K, RANK, ROWS, BLOCK_RANK, BLOCK_K, SPLIT, GROUP_K, K_GROUPS > 1,
                X_SCALED,
            )  # fmt: skip
    else:
        first_group, num_groups = groups_of(counts, starts, place * ROWS, ROWS, NUM_IDS, LANES)
        for i in range(num_groups):
            slot, start, count = load_group(
                counts, starts, lora_ids, first_group + i, num_rows, MAX_LORAS, NUM_IDS
            )
            if slot >= 0:
                rows, mine = load_places(order, place * ROWS, start, start + count, ROWS)
                _shrink_rows(
                    h, x, _aligned(a + slot.to(tl.int64) * slot_stride, ALIGNED), x_scales,
                    a_scales + slot * (N_GROUPS * K_GROUPS), rows, mine, r, split, scale, x_stride,
                    rank_stride, x_scale_stride, x_scale_k, K, RANK, ROWS, BLOCK_RANK, BLOCK_K, SPLIT,
                    GROUP_K, K_GROUPS > 1, X_SCALED,
                )  # fmt: skip


@triton.jit
def _expand_rows(
    y, h, b, h_scales, b_scales, rows, mine, begin, end, step, width, y_stride, b_stride, h_scale_stride,
    h_scale_k,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, H_SCALED: tl.constexpr, ADD_INPUTS: tl.constexpr,
):  # fmt: skip
    """Columns of the rows that are `mine`: every step-th from `begin` to `end`, BLOCK_N at once."""
    H_DTYPE: tl.constexpr = h.dtype.element_ty
    WIDE: tl.constexpr = H_DTYPE.primitive_bitwidth == 32
    FP8: tl.constexpr = H_DTYPE.is_fp8()
    DTYPE: tl.constexpr = tl.float16 if FP8 else y.dtype.element_ty if WIDE else H_DTYPE
    K_GROUPS: tl.constexpr = (RANK + GROUP_K - 1) // GROUP_K
    h_rows, row_scales = (h + rows * RANK)[:, None], h_scales + rows * h_scale_stride
    for column in range(begin, end, step):
        n = column + tl.arange(0, BLOCK_N)
        factors = b_scales + tl.minimum(n, width - 1) // GROUP_N * K_GROUPS
        acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
        for block in range(0, RANK, BLOCK_RANK):
            r = block + tl.arange(0, BLOCK_RANK)
            b_places = b + n[:, None] * b_stride + r[None, :]
            b_tile = tl.load(b_places, mask=(n < width)[:, None] & (r < RANK)[None, :], other=0.0)
            h_tile = tl.load(h_rows + r[None, :], mask=mine[:, None] & (r < RANK)[None, :], other=0.0)
            group = block // GROUP_K
            acc = _add_product(
                acc, h_tile, b_tile, row_scales + group * h_scale_k, factors + group, DTYPE, K_GROUPS > 1,
                H_SCALED,
            )  # fmt: skip
        acc = _times_scales(acc, row_scales, factors, K_GROUPS > 1, H_SCALED)
        places, valid = y + (rows * y_stride)[:, None] + n[None, :], mine[:, None] & (n < width)[None, :]
        if ADD_INPUTS:
            acc += tl.load(places, mask=valid, other=0.0).to(tl.float32)
        tl.store(places, acc.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def expand_fp8_kernel(
    y, h, b0, b1, b2, h_scales, b_scales0, b_scales1, b_scales2, order, counts, starts, lora_ids,
    num_rows, y_stride, slot_stride0, slot_stride1, slot_stride2, b_stride, h_scale_stride, h_scale_k,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, NUM_IDS: tl.constexpr, LANES: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, TEAMS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr,
    H_SCALED: tl.constexpr, ADD_INPUTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS columns, slice, place): a member's share of them for its team, or a tile's groups.

    TEAMS: as in shrink_fp8_kernel, but each member works. h is [slices, num_rows, RANK].
    """
    tile, s, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = of_slice(s, WIDTH0, WIDTH1, WIDTH2, SLICES)
    slot_stride = of_slice(s, slot_stride0, slot_stride1, slot_stride2, SLICES)
    K_GROUPS: tl.constexpr = (RANK + GROUP_K - 1) // GROUP_K
    scales_a_slot = (width + GROUP_N - 1) // GROUP_N * K_GROUPS
    b = of_slice(s, b0, b1, b2, SLICES)
    b_scales = of_slice(s, b_scales0, b_scales1, b_scales2, SLICES)
    y += of_slice(s, START0, START1, START2, SLICES)
    h += tl.cast(s, tl.int64) * num_rows * RANK
    begin, end = tile * COLUMNS, tl.minimum((tile + 1) * COLUMNS, width)
    if TEAMS:
        slot, first, members, number = load_member(
            counts, starts, lora_ids, place, num_rows, MAX_LORAS, NUM_IDS, LANES, ROWS, 0
        )
        if (members > 0) & (slot >= 0):
            rows, mine = load_places(order, first, first, first + members, ROWS)
            _expand_rows(
                y, h, _aligned(b + slot.to(tl.int64) * slot_stride, ALIGNED), h_scales,
                b_scales + slot * scales_a_slot, rows, mine, begin + number * BLOCK_N, end, members * BLOCK_N,
                width, y_stride, b_stride, h_scale_stride, h_scale_k, RANK, ROWS, BLOCK_RANK, BLOCK_N,
                GROUP_N, GROUP_K, H_SCALED, ADD_INPUTS,
            )  # fmt: skip
    else:
        first_group, num_groups = groups_of(counts, starts, place * ROWS, ROWS, NUM_IDS, LANES)
        for i in range(num_groups):
            slot, start, count = load_group(
                counts, starts, lora_ids, first_group + i, num_rows, MAX_LORAS, NUM_IDS
            )
            if slot >= 0:
                rows, mine = load_places(order, place * ROWS, start, start + count, ROWS)
                _expand_rows(
                    y, h, _aligned(b + slot.to(tl.int64) * slot_stride, ALIGNED), h_scales,
                    b_scales + slot * scales_a_slot, rows, mine, begin, end, BLOCK_N, width, y_stride,
                    b_stride, h_scale_stride, h_scale_k, RANK, ROWS, BLOCK_RANK, BLOCK_N, GROUP_N, GROUP_K,
                    H_SCALED, ADD_INPUTS,
                )  # fmt: skip
