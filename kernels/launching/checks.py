"""Argument checks shared by every launcher: shapes, dtypes, devices. No check reads a tensor's data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.metadata.launch_plan import MAX_SLICES
from kernels.metadata.meta import LoRAKernelMeta


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
    """[slices, rows, max_rank], or that with shrink's splits before it."""
    expected = (slices, meta.num_rows, max_rank)
    if tuple(h.shape[-3:]) != expected or h.dim() > 4 or h.dtype != torch.float32:
        raise KernelArgumentError("h", f"must be float32 {list(expected)}, is {h.dtype} {list(h.shape)}")


def check_hidden_block(h: Tensor, weight: Tensor, slices: int, meta: LoRAKernelMeta) -> None:
    """What the Triton kernels ask of h: one block of memory beside the weights."""
    check_hidden(h, slices, weight.shape[1], meta)
    check(h.is_contiguous(), "h", "must be contiguous")
    check_same_device(weight.device, h=h)


def check_same_device(expected: torch.device, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.device != expected:
            raise KernelArgumentError(
                argument, f"is on {tensor.device}, the other arguments are on {expected}"
            )


def check_metas_device(meta: LoRAKernelMeta, **tensors: Tensor) -> None:
    """Where the metadata is: work lists and tensors meet in one kernel."""
    for argument, tensor in tensors.items():
        if tensor.device != meta.items.device:
            where = f"is on {tensor.device}, the step's metadata on {meta.items.device}"
            raise KernelArgumentError(argument, where)


def slices_by_name(stack: Sequence[Tensor], argument: str) -> dict[str, Tensor]:
    return {f"{argument}[{index}]": weight for index, weight in enumerate(stack)}


def check_shrink(
    h: Tensor, x: Tensor, lora_a: Sequence[Tensor], ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
) -> None:
    check_rows(x, "x", meta)
    check(x.dim() == 2 and x.is_floating_point(), "x", "must be a floating [rows, in]")
    check(len(lora_a) > 0 and lora_a[0].dim() == 3, "lora_a", "must hold slices [max_loras, max_rank, in]")
    max_rank = lora_a[0].shape[1]
    check_stack(lora_a, "lora_a", max_rank, meta)
    for index, weight in enumerate(lora_a):
        if weight.shape[2] != x.shape[1]:
            raise KernelArgumentError(f"lora_a[{index}]", f"has width {weight.shape[2]}, x {x.shape[1]}")
    check_hidden(h, len(lora_a), max_rank, meta)
    check_table(ranks, "ranks", torch.int32, len(lora_a), meta)
    check_table(scales, "scales", torch.float32, len(lora_a), meta)
    check_metas_device(meta, x=x, h=h, ranks=ranks, scales=scales, **slices_by_name(lora_a, "lora_a"))


def check_embedding(
    h: Tensor, token_ids: Tensor, lora_a: Tensor, ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
) -> None:
    check_rows(token_ids, "token_ids", meta)
    integral = token_ids.dim() == 1 and token_ids.dtype in (torch.int32, torch.int64)
    check(integral, "token_ids", "must be int32 or int64 [rows]")
    check(lora_a.dim() == 3, "lora_a", "must be [max_loras, max_rank, vocab]")
    check_stack((lora_a,), "lora_a", lora_a.shape[1], meta)
    check_hidden(h, 1, lora_a.shape[1], meta)
    check_table(ranks, "ranks", torch.int32, 1, meta)
    check_table(scales, "scales", torch.float32, 1, meta)
    check_metas_device(meta, token_ids=token_ids, h=h, lora_a=lora_a, ranks=ranks, scales=scales)


def check_expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    starts: Sequence[int],
    meta: LoRAKernelMeta,
    output_scale: Tensor | None,
) -> None:
    check_rows(y, "y", meta)
    check(y.dim() == 2 and y.is_floating_point(), "y", "must be a floating [rows, columns]")
    check(len(lora_b) > 0 and lora_b[0].dim() == 3, "lora_b", "must hold slices [max_loras, max_rank, out]")
    max_rank = lora_b[0].shape[1]
    check_stack(lora_b, "lora_b", max_rank, meta)
    if len(starts) != len(lora_b):
        raise KernelArgumentError("column_starts", f"names {len(starts)} slices, lora_b {len(lora_b)}")
    for start, weight in zip(starts, lora_b, strict=True):
        ends = start + weight.shape[2]
        if start < 0 or ends > y.shape[1]:
            raise KernelArgumentError("column_starts", f"{start}..{ends} exceed y's {y.shape[1]} columns")
    check_hidden(h, len(lora_b), max_rank, meta)
    check_table(ranks, "ranks", torch.int32, len(lora_b), meta)
    check_metas_device(meta, y=y, h=h, ranks=ranks, **slices_by_name(lora_b, "lora_b"))
    if output_scale is not None:
        check_output_scale(output_scale, lora_b, meta)


def check_output_scale(output_scale: Tensor, lora_b: Sequence[Tensor], meta: LoRAKernelMeta) -> None:
    expected = (meta.max_loras, sum(weight.shape[2] for weight in lora_b))
    if tuple(output_scale.shape) != expected or output_scale.dtype != torch.float32:
        raise KernelArgumentError(
            "output_scale",
            f"must be float32 {list(expected)}, is {output_scale.dtype} {list(output_scale.shape)}",
        )
    check(output_scale.stride(1) == 1, "output_scale", "must have contiguous rows")
    check_same_device(lora_b[0].device, output_scale=output_scale)


def check_launchable(stack_name: str, stack: Sequence[Tensor], **tensors: Tensor) -> None:
    """What the Triton kernels ask beyond the reference: strides that they can follow."""
    check(len(stack) <= MAX_SLICES, stack_name, f"holds {len(stack)} slices, at most {MAX_SLICES} are served")
    first = stack[0]
    for index, weight in enumerate(stack):
        if weight.stride(0) != first.stride(0) or weight.dtype != first.dtype:
            raise KernelArgumentError(
                f"{stack_name}[{index}]", "has another slot stride or dtype than slice 0"
            )
        if weight.stride(1) * weight.shape[1] >= 2**31:
            raise KernelArgumentError(f"{stack_name}[{index}]", "has slots of 2^31 elements or more")
    for argument, tensor in tensors.items():
        # Rows of x and y may be strided; h and the tables are addressed as whole blocks.
        strided = argument in ("x", "y")
        if tensor.stride(-1) != 1 if strided else not tensor.is_contiguous():
            raise KernelArgumentError(argument, f"must be contiguous, has strides {tensor.stride()}")


def check_sampled_rows(logits: Tensor, **vectors: tuple[Tensor, torch.dtype]) -> None:
    """Logits float32 [rows, vocab], and of every row one value in each vector, of its dtype."""
    matrix = logits.dim() == 2 and logits.is_contiguous() and logits.dtype == torch.float32
    check(matrix, "logits", "must be a contiguous float32 [rows, vocab]")
    for argument, (values, dtype) in vectors.items():
        fits = values.shape == logits.shape[:1] and values.dtype == dtype and values.is_contiguous()
        check(fits, argument, f"must be a contiguous {dtype} [{len(logits)}]")
        check_same_device(logits.device, **{argument: values})
