"""The o and down layers' expand inside residual-add and RMSNorm, on the GPU.

The truth is kernels/reference/lora_expand_add_rms_norm.py. y is read once, and its sum with the delta is
never written apart.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_hidden_block, check_rows
from kernels.launching.follower import check_add_rms_norm, check_follower, check_like, check_rows_contiguous
from kernels.launching.follower_tuning import NormConfig, add_rms_norm_config, plain_norm_warps
from kernels.launching.launch import Launch, row_signature, signature
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.device import has_dependent_launch, let_next_kernel_start, wait_for_former_kernel
from kernels.tiles.expand_tile import delta, load_b, load_h, load_rank

# A row and its share of B must fit a program's registers.
MAX_HIDDEN = 8192


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
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
    # Rounded before it meets the weight, as the executor's RMSNorm does.
    normal = (values * scale).to(out.dtype.element_ty).to(tl.float32)
    result = (factors.to(tl.float32) * normal).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + n, result, mask=valid)


def lora_expand_add_rms_norm(
    out: Tensor,
    residual: Tensor,
    y: Tensor,
    h: Tensor,
    lora_b: Tensor,
    ranks: Tensor,
    weight: Tensor,
    eps: float,
    meta: LoRAKernelMeta,
    config: NormConfig | None = None,
) -> None:
    """Semantics: residual[row(p)] += y[row(p)] + h[0, p, :r] @ lora_b[slot, :r]; out = norm(residual).

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[0, slot]; base rows have no product. norm(z) = z / sqrt(mean(z^2) + eps) * weight, row by row.

    out       [rows, hidden], as y, overwritten
    residual  [rows, hidden], as y, changed in place
    y         floating [rows, hidden], contiguous rows: the base layer's output; only read
    h         float32 [1, rows, max_rank] or [splits, 1, rows, max_rank], whose sum counts; from lora_shrink
    lora_b    rank-major [max_loras, max_rank, hidden], a strided view is allowed; a row >= r is never read
    ranks     int32 [1, max_loras], contiguous; 0: the slot has no such module
    weight    [hidden], as y
    config    block sizes. None: the tuned ones for this step

    The residual's sum is formed in float32 and rounded once; the normalised row is rounded before it meets
    the weight. On sm_90 lora_b, ranks, weight and metadata are read while the kernel before may still run
    (`let_next_kernel_start` says who must not write them). Raises KernelArgumentError.

    Serves up to 8192 columns, and pays in steps of up to some hundred rows: every row reads its B anew, and
    forms that share it (16 rows by tl.dot in two walks, 4 rows by sums) lost at (8192, 8) too: o 91, the pair
    86 us more than without LoRA. Wider rows, DoRA's output scale, tensor-parallel layers (whose y is not yet
    the sum over devices) and other norms take lora_expand and what follows it. High ranks that the plan cuts
    into parts are right here but slow.
    """
    rows, hidden = len(y), y.shape[-1]
    config = config or add_rms_norm_config(meta.plan, hidden, y.element_size())
    splits = h.shape[0] if h.dim() == 4 else 1
    row_tensors = (row_signature(out), row_signature(residual), row_signature(y))
    form = ("add_rms_norm", config, splits, row_tensors, signature(lora_b, ranks, weight))
    launch = meta.launches.get(form)
    if launch is None:
        check_add_rms_norm(out, residual, y, h, lora_b, ranks, weight, meta)
        check_follower((lora_b,), y=y, out=out, residual=residual, weight=weight, ranks=ranks)
        check(hidden <= MAX_HIDDEN, "y", f"has {hidden} columns, at most {MAX_HIDDEN} are served")
        launch = _launch(config, splits, lora_b, meta.max_loras, has_dependent_launch(y.device))
        meta.launches[form] = launch
    for argument, tensor in (("y", y), ("out", out), ("residual", residual)):
        check_rows(tensor, argument, meta)
    check_hidden_block(h, lora_b, 1, meta)
    if meta.plan.items == 0:
        add_rms_norm(out, residual, y, weight, eps)
        return
    launch(
        (rows,), out, residual, y, h, lora_b, ranks, weight, meta.token_indices_sorted_by_lora_ids,
        meta.token_lora_mapping, meta.num_rows, out.stride(0), residual.stride(0), y.stride(0),
        lora_b.stride(0), lora_b.stride(1), eps,
    )  # fmt: skip


def _launch(config: NormConfig, splits: int, lora_b: Tensor, max_loras: int, pdl: bool) -> Launch:
    hidden = lora_b.shape[2]
    constants = {
        "HIDDEN": hidden, "MAX_LORAS": max_loras, "MAX_RANK": lora_b.shape[1], "SPLIT": splits,
        "BLOCK_RANK": config.block_rank, "BLOCK_N": triton.next_power_of_2(hidden), "HAS_LORA": True,
        "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "launch_pdl": pdl}
    return Launch(add_rms_norm_kernel, constants, options)


def add_rms_norm(out: Tensor, residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
    """Semantics: residual += y; out = rms_norm(residual) * weight; all [rows, hidden] with contiguous rows.

    Rounds as lora_expand_add_rms_norm does. Raises KernelArgumentError.
    """
    served = y.dim() == 2 and y.shape[1] <= MAX_HIDDEN
    check(served, "y", f"must be [rows, up to {MAX_HIDDEN}], is {list(y.shape)}")
    check_like(out, "out", y, "y")
    check_like(residual, "residual", y, "y")
    check_like(weight, "weight", y.new_empty(y.shape[1]), "a row of y")
    check_rows_contiguous(out=out, residual=residual, y=y, weight=weight)
    rows, hidden = y.shape
    if rows == 0:
        return
    block_n = triton.next_power_of_2(hidden)
    pdl = has_dependent_launch(y.device)
    add_rms_norm_kernel[(rows,)](
        out=out, residual=residual, y=y, h=y, b=y, ranks=y, weight=weight, order=y, mapping=y, num_rows=rows,
        out_stride=out.stride(0), residual_stride=residual.stride(0), y_stride=y.stride(0), slot_stride=0,
        b_stride=0, eps=eps, HIDDEN=hidden, MAX_LORAS=0, MAX_RANK=0, SPLIT=0, BLOCK_RANK=0, BLOCK_N=block_n,
        HAS_LORA=False, PDL=pdl, num_warps=plain_norm_warps(rows, hidden), launch_pdl=pdl,
    )  # fmt: skip
