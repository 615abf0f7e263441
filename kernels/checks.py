"""Argument checks shared by every launcher: shapes, dtypes, devices. No check reads a tensor's data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.meta import LoRAKernelMeta


def check(ok: bool, argument: str, problem: str) -> None:
    if not ok:
        raise KernelArgumentError(argument, problem)


def check_rows(tensor: Tensor, argument: str, meta: LoRAKernelMeta) -> None:
    """The first dimension is the rows that `meta` describes: more or fewer would read another row's slot."""
    if tensor.dim() == 0 or tensor.shape[0] != meta.num_rows:
        raise KernelArgumentError(
            argument,
            f"has shape {tuple(tensor.shape)}, but the step's metadata describes {meta.num_rows} rows",
        )


def check_table(table: Tensor, argument: str, dtype: torch.dtype, slices: int, meta: LoRAKernelMeta) -> None:
    expected = (slices, meta.max_loras)
    if tuple(table.shape) != expected or table.dtype != dtype:
        raise KernelArgumentError(
            argument,
            f"must be {dtype} {list(expected)} [slices, max_loras], is {table.dtype} {list(table.shape)}",
        )


def check_stack(stack: Sequence[Tensor], argument: str, max_rank: int, meta: LoRAKernelMeta) -> None:
    """Every slice is [max_loras, max_rank, width]; its rows are contiguous, its slots may be strided."""
    check(len(stack) > 0, argument, "holds no slice")
    for index, weight in enumerate(stack):
        if weight.dim() != 3 or weight.shape[:2] != (meta.max_loras, max_rank):
            expected = f"[{meta.max_loras}, {max_rank}, width]"
            raise KernelArgumentError(f"{argument}[{index}]", f"must be {expected}, is {list(weight.shape)}")
        check(
            weight.stride(2) == 1,
            f"{argument}[{index}]",
            "must have contiguous rows (stride 1 along the width)",
        )


def check_hidden(h: Tensor, slices: int, max_rank: int, meta: LoRAKernelMeta) -> None:
    expected = (slices, meta.num_rows, max_rank)
    if tuple(h.shape) != expected or h.dtype != torch.float32:
        raise KernelArgumentError("h", f"must be float32 {list(expected)}, is {h.dtype} {list(h.shape)}")


def check_same_device(expected: torch.device, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.device != expected:
            raise KernelArgumentError(
                argument, f"is on {tensor.device}, the other arguments are on {expected}"
            )
