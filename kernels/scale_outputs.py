"""DoRA's factors on a layer's outputs, on the GPU. The truth is kernels/reference/scale_outputs.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check_rows
from kernels.launching.launch import Launch, row_signature, signature
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.scale_outputs import check_scale_outputs
from kernels.tiles.device import has_dependent_launch, let_next_kernel_start, wait_for_former_kernel

_BLOCK_N = 1024
_NUM_WARPS = 4


@triton.jit
def scale_outputs_kernel(
    y, factors, marks, mapping, bias, y_stride, factor_stride,
    WIDTH: tl.constexpr, MAX_LORAS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, row). Rows without factors cost two loads; the factors are there before y is."""
    let_next_kernel_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(mapping + row).to(tl.int64)
    mark = tl.load(marks + slot, mask=(slot >= 0) & (slot < MAX_LORAS), other=-1)
    if mark < 0:
        wait_for_former_kernel(PDL)
        return

    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < WIDTH
    factor = tl.load(factors + slot * factor_stride + n, mask=valid, other=1.0)
    if HAS_BIAS:
        kept = tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)
    places = y + row * y_stride + n
    wait_for_former_kernel(PDL)
    before = tl.load(places, mask=valid, other=0.0).to(tl.float32)
    result = before * factor
    if HAS_BIAS:
        result = tl.where(factor == 1.0, before, (before - kept) * factor + kept)
    tl.store(places, result.to(y.dtype.element_ty), mask=valid)


def scale_outputs(
    y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, meta: LoRAKernelMeta
) -> None:
    """Semantics: y[row] = factors[slot] * (y[row] - bias) + bias, where marks[slot of row] >= 0.

    The arguments are those of kernels/reference/scale_outputs.py. A captured graph reads what factors, marks
    and metadata say at its replay. On sm_90 they are read while the kernel before may still run
    (`let_next_kernel_start` says who must not write them). Raises KernelArgumentError.
    """
    tables = (factors, marks) if bias is None else (factors, marks, bias)
    key = ("scale_outputs", row_signature(y), signature(*tables))
    launch: Launch | None = meta.launches.get(key)
    if launch is None:
        check_scale_outputs(y, factors, marks, bias, meta)
        pdl = has_dependent_launch(y.device)
        constants = {
            "WIDTH": y.shape[1], "MAX_LORAS": meta.max_loras, "HAS_BIAS": bias is not None,
            "BLOCK_N": _BLOCK_N, "PDL": pdl,
        }  # fmt: skip
        launch = Launch(scale_outputs_kernel, constants, {"num_warps": _NUM_WARPS, "launch_pdl": pdl})
        meta.launches[key] = launch
    check_rows(y, "y", meta)
    rows, columns = y.shape
    if rows == 0:
        return
    launch(
        (triton.cdiv(columns, _BLOCK_N), rows), y, factors, marks, meta.token_lora_mapping,
        factors if bias is None else bias, y.stride(0), factors.stride(0),
    )  # fmt: skip
