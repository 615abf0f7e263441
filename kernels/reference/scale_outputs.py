"""DoRA's factors on a layer's outputs: base product and delta times a factor, before the bias."""

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_metas_device, check_rows
from kernels.metadata.meta import LoRAKernelMeta


def scale_outputs(
    y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, meta: LoRAKernelMeta
) -> None:
    """Semantics: y[row] = factors[slot] * (y[row] - bias) + bias, where marks[slot of row] >= 0.

    y        floating [rows, columns], changed in place; other rows, and columns of factor 1, are untouched
    factors  float32 [max_loras, columns], contiguous rows, of which only marked slots' are read
    marks    int32 [max_loras + 1], negative for a slot without factors; the last entry is not read
    bias     [columns], which is in y and stays as it is; None for 0

    In float32, rounded once to y's dtype. Raises KernelArgumentError.
    """
    check_scale_outputs(y, factors, marks, bias, meta)
    marked = marks.tolist()
    for group in meta.groups:
        if marked[group.slot] >= 0:
            rows = y[group.rows].float()
            y[group.rows] = _scaled(rows, factors[group.slot], bias).to(y.dtype)


def _scaled(rows: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return rows * factors
    return torch.where(factors == 1, rows, (rows - bias.float()) * factors + bias.float())


def check_scale_outputs(
    y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, meta: LoRAKernelMeta
) -> None:
    check_rows(y, "y", meta)
    check(y.dim() == 2 and y.is_floating_point(), "y", "must be a floating [rows, columns]")
    check(y.stride(1) == 1, "y", f"must have contiguous rows, has strides {y.stride()}")
    expected = (meta.max_loras, y.shape[1])
    if tuple(factors.shape) != expected or factors.dtype != torch.float32 or factors.stride(1) != 1:
        raise KernelArgumentError(
            "factors",
            f"must be float32 {list(expected)} of contiguous rows, is {factors.dtype} {list(factors.shape)}",
        )
    fits = marks.shape == (meta.max_loras + 1,) and marks.dtype == torch.int32 and marks.is_contiguous()
    check(fits, "marks", f"must be a contiguous int32 [{meta.max_loras + 1}]")
    check_metas_device(meta, y=y, factors=factors, marks=marks)
    if bias is not None:
        fits = bias.shape == y.shape[1:] and bias.is_floating_point() and bias.is_contiguous()
        check(fits, "bias", f"must be a contiguous floating [{y.shape[1]}]")
        check_metas_device(meta, bias=bias)
