"""The o and down layers' expand inside residual-add and RMSNorm: y is read once, its sum never written apart.

The truth is kernels/reference/lora_expand_add_rms_norm.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check
from kernels.device import has_dependent_launch, let_next_kernel_start, load_rows, wait_for_former_kernel
from kernels.expand_tile import delta, load_b, load_entry, load_h, load_rank, places_of, valid_of
from kernels.follower import Entries, check_add_rms_norm, check_follower
from kernels.follower_tuning import NormConfig, add_rms_norm_config
from kernels.meta import LoRAKernelMeta

# A row and its share of B must fit a program's registers.
_MAX_HIDDEN = 8192


@triton.jit
def _normalise(out, place, values, factors, scale, valid):
    """factors * (values * scale), rounded before the product as the executor's RMSNorm does."""
    element = out.dtype.element_ty
    normal = (values * scale).to(element).to(tl.float32)
    tl.store(out + place, (factors.to(tl.float32) * normal).to(element), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_row_kernel(
    out, residual, y, h, b, ranks, weight, order, mapping,
    num_rows, out_stride, residual_stride, y_stride, slot_stride, b_stride, eps,
    HIDDEN: tl.constexpr, MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LORA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (place): a whole row, base rows too. B and the weight are on their way before the wait."""
    let_next_kernel_start(PDL)
    place = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    valid = n < HIDDEN
    row = place.to(tl.int64)
    if HAS_LORA:
        row = tl.load(order + place).to(tl.int64)
        slot = tl.load(mapping + row)
        rank = load_rank(ranks, 0, slot, MAX_LORAS, MAX_RANK)
        b += slot.to(tl.int64) * slot_stride
        r = tl.arange(0, BLOCK_RANK)
        b_tile = load_b(b, b_stride, r, n, rank, HIDDEN)
    factors = tl.load(weight + n, mask=valid, other=0.0)
    wait_for_former_kernel(PDL)
    total = tl.load(y + row * y_stride + n, mask=valid, other=0.0).to(tl.float32)
    total += tl.load(residual + row * residual_stride + n, mask=valid, other=0.0).to(tl.float32)
    if HAS_LORA:
        h_tile = load_h(h, 0, place, 1, r, rank, num_rows, 1, SPLIT, MAX_RANK, 1)
        total += delta(
            h_tile, b_tile, h, b, b_stride, 0, place, 1, n, rank, HIDDEN, num_rows, 1, SPLIT, MAX_RANK, 1,
            BLOCK_RANK, BLOCK_N,
        )  # fmt: skip
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + row * residual_stride + n, rounded, mask=valid)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    _normalise(out, row * out_stride + n, values, factors, scale, valid)


@triton.jit(do_not_specialize=["num_rows", "listed"])
def add_rms_norm_tile_kernel(
    out, residual, y, h, b, ranks, weight, work, order, starts,
    num_rows, listed, out_stride, residual_stride, y_stride, slot_stride, b_stride, eps,
    HIDDEN: tl.constexpr, MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (entry): its rows' sums and squares tile by tile, then the same rows again, from the caches."""
    let_next_kernel_start(PDL)
    slot, start, count = load_entry(work, tl.program_id(0), listed, starts, num_rows, MAX_LORAS, ROWS)
    if count == 0:
        wait_for_former_kernel(PDL)
        return

    rank = load_rank(ranks, 0, slot, MAX_LORAS, MAX_RANK)
    b += slot.to(tl.int64) * slot_stride
    rows = load_rows(order, start, count, ROWS)
    r = tl.arange(0, BLOCK_RANK)
    wait_for_former_kernel(PDL)
    h_tile = load_h(h, 0, start, count, r, rank, num_rows, 1, SPLIT, MAX_RANK, ROWS)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    for first in tl.range(0, HIDDEN, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        valid = valid_of(count, n < HIDDEN, ROWS)
        places = residual + places_of(rows, residual_stride, n, ROWS)
        b_tile = load_b(b, b_stride, r, n, rank, HIDDEN)
        total = tl.load(y + places_of(rows, y_stride, n, ROWS), mask=valid, other=0.0).to(tl.float32)
        total += tl.load(places, mask=valid, other=0.0).to(tl.float32)
        total += delta(
            h_tile, b_tile, h, b, b_stride, 0, start, count, n, rank, HIDDEN, num_rows, 1, SPLIT, MAX_RANK,
            ROWS, BLOCK_RANK, BLOCK_N,
        )  # fmt: skip
        rounded = total.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=valid)
        squares += tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1)
    scale = tl.rsqrt(squares / HIDDEN + eps)[:, None]
    tl.debug_barrier()  # the second walk may give an element to another thread than the first
    for first in tl.range(0, HIDDEN, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        valid = valid_of(count, n < HIDDEN, ROWS)
        values = tl.load(residual + places_of(rows, residual_stride, n, ROWS), mask=valid, other=0.0)
        factors = tl.load(weight + n, mask=n < HIDDEN, other=0.0)[None, :]
        _normalise(out, places_of(rows, out_stride, n, ROWS), values.to(tl.float32), factors, scale, valid)
