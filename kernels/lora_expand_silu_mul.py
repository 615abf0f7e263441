"""The gate_up layer's expand inside SiLU-and-multiply, on the GPU.

The truth is kernels/reference/lora_expand_silu_mul.py. y is read once, and its sum with the delta is never
written.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_hidden_block, check_rows
from kernels.launching.follower import (
    Entries,
    check_follower,
    check_like,
    check_rows_contiguous,
    check_silu_mul,
)
from kernels.launching.follower_tuning import PLAIN, FollowerConfig, silu_mul_config
from kernels.launching.launch import Launch, row_signature, signature
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.block_tile import rows_by, valid_by
from kernels.tiles.device import has_dependent_launch, let_next_kernel_start, wait_for_former_kernel
from kernels.tiles.expand_tile import delta, load_b, load_entry, load_h, load_rank, rows_at


@triton.jit(do_not_specialize=["num_rows", "listed"])
def expand_silu_mul_kernel(
    out, y, h, b0, b1, ranks, work, order, starts,
    num_rows, listed, out_stride, y_stride, slot_stride, b_stride0, b_stride1,
    WIDTH: tl.constexpr, MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LORA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, entry): the tile of gate and of up. B is on its way before the wait."""
    let_next_kernel_start(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, start, count = load_entry(
        work, tl.program_id(1), listed, starts, num_rows, MAX_LORAS, ROWS, HAS_LORA
    )
    if count == 0:
        wait_for_former_kernel(PDL)
        return

    if HAS_LORA:
        rank0 = load_rank(ranks, 0, slot, MAX_LORAS, MAX_RANK)
        rank1 = load_rank(ranks, 1, slot, MAX_LORAS, MAX_RANK)
        b0 += slot.to(tl.int64) * slot_stride
        b1 += slot.to(tl.int64) * slot_stride
        r = tl.arange(0, BLOCK_RANK)
        gate_b = load_b(b0, b_stride0, r, n, rank0, WIDTH)
        up_b = load_b(b1, b_stride1, r, n, rank1, WIDTH)
    rows = rows_at(order, start, count, ROWS, HAS_LORA)
    valid = valid_by(count, n < WIDTH, ROWS)
    places = y + rows_by(rows, n, y_stride, ROWS)
    wait_for_former_kernel(PDL)
    if HAS_LORA:
        gate_h = load_h(h, 0, start, count, r, rank0, num_rows, 2, SPLIT, MAX_RANK, ROWS)
        up_h = load_h(h, 1, start, count, r, rank1, num_rows, 2, SPLIT, MAX_RANK, ROWS)
    gate = tl.load(places, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=valid, other=0.0).to(tl.float32)
    if HAS_LORA:
        gate += delta(
            gate_h, gate_b, h, b0, b_stride0, 0, start, count, n, rank0, WIDTH, num_rows, 2, SPLIT, MAX_RANK,
            ROWS, BLOCK_RANK, BLOCK_N,
        )  # fmt: skip
        up += delta(
            up_h, up_b, h, b1, b_stride1, 1, start, count, n, rank1, WIDTH, num_rows, 2, SPLIT, MAX_RANK,
            ROWS, BLOCK_RANK, BLOCK_N,
        )  # fmt: skip
    result = (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + rows_by(rows, n, out_stride, ROWS), result, mask=valid)


def lora_expand_silu_mul(
    out: Tensor,
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    meta: LoRAKernelMeta,
    config: FollowerConfig | None = None,
) -> None:
    """Semantics: out[row(p)] = silu(y[row(p), :n] + d[0, p]) * (y[row(p), n:] + d[1, p]).

    d[s, p] = h[s, p, :r] @ lora_b[s][slot, :r], 0 for base rows.
    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[s, slot].

    out     [rows, n], of y's dtype, contiguous rows, overwritten
    y       floating [rows, 2n], contiguous rows: the base layer's output, gate then up; only read
    h       float32 [2, rows, max_rank] or [splits, 2, rows, max_rank], whose sum counts; from lora_shrink
    lora_b  gate's and up's rank-major B, [max_loras, max_rank, n], of one arena; a row >= r is never read
    ranks   int32 [2, max_loras], contiguous; 0: the slot has no such module
    config  block sizes. None: the tuned ones for this step

    All in float32, rounded once. On sm_90 weights, ranks and metadata are read while the kernel before may
    still run (`let_next_kernel_start` says who must not write them). Raises KernelArgumentError.

    Serves gate and up as two slices, and a bias where the base layer adds it to y. Slots for only one of the
    two and DoRA's output scale take lora_expand, then silu_mul. High ranks that the plan cuts into parts are
    right here but slow.
    """
    config = config or silu_mul_config(meta.plan, y.element_size())
    splits = h.shape[0] if h.dim() == 4 else 1
    form = ("silu_mul", config, splits, row_signature(out), row_signature(y), signature(*lora_b, ranks))
    launch = meta.launches.get(form)
    if launch is None:
        check_silu_mul(out, y, h, lora_b, ranks, meta)
        check_follower(lora_b, y=y, out=out, ranks=ranks)
        launch = _launch(config, splits, lora_b[0], meta.max_loras, has_dependent_launch(y.device))
        meta.launches[form] = launch
    check_rows(y, "y", meta)
    check_rows(out, "out", meta)
    gate, up = lora_b
    check_hidden_block(h, gate, 2, meta)
    if meta.plan.items == 0:
        silu_mul(out, y)
        return
    entries = Entries.of(meta, config.rows)
    launch(
        (triton.cdiv(out.shape[1], config.block_n), entries.total), out, y, h, gate, up, ranks, entries.work,
        meta.token_indices_sorted_by_lora_ids, meta.lora_token_start_loc, meta.num_rows, entries.listed,
        out.stride(0), y.stride(0), gate.stride(0), gate.stride(1), up.stride(1),
    )  # fmt: skip


def _launch(config: FollowerConfig, splits: int, gate: Tensor, max_loras: int, pdl: bool) -> Launch:
    constants = {
        "WIDTH": gate.shape[2], "MAX_LORAS": max_loras, "MAX_RANK": gate.shape[1], "SPLIT": splits,
        "ROWS": config.rows, "BLOCK_RANK": config.block_rank, "BLOCK_N": config.block_n, "HAS_LORA": True,
        "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    return Launch(expand_silu_mul_kernel, constants, options)


def silu_mul(out: Tensor, y: Tensor) -> None:
    """Semantics: out[row] = silu(y[row, :n]) * y[row, n:]; y [rows, 2n], out [rows, n], contiguous rows.

    Float32 inside, rounded once. Raises KernelArgumentError.
    """
    check(y.dim() == 2 and y.shape[1] % 2 == 0, "y", f"must be [rows, 2n], is {list(y.shape)}")
    check_like(out, "out", y[:, : y.shape[1] // 2], "half of y")
    check_rows_contiguous(out=out, y=y)
    rows, width = out.shape
    if rows == 0:
        return
    pdl = has_dependent_launch(y.device)
    expand_silu_mul_kernel[(triton.cdiv(width, PLAIN.block_n), rows)](
        out=out, y=y, h=y, b0=y, b1=y, ranks=y, work=y, order=y, starts=y, num_rows=rows, listed=0,
        out_stride=out.stride(0), y_stride=y.stride(0), slot_stride=0, b_stride0=0, b_stride1=0, WIDTH=width,
        MAX_LORAS=0, MAX_RANK=0, SPLIT=0, ROWS=PLAIN.rows, BLOCK_RANK=0, BLOCK_N=PLAIN.block_n,
        HAS_LORA=False, PDL=pdl, num_warps=PLAIN.num_warps, launch_pdl=pdl,
    )  # fmt: skip
