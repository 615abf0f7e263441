"""lora_shrink of the reference API: rows into their adapters' rank space."""

from collections.abc import Sequence

from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device
from kernels.launching.fp8 import is_fp8
from kernels.vllm.dense import reference
from kernels.vllm.dense.step import Step
from kernels.vllm.operators import register


def _lora_shrink(
    inputs: Tensor,
    lora_a_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor,
    scaling: float,
) -> None:
    """Semantics: output_tensor[s, row] = scaling * (inputs[row] @ lora_a_weights[s][slot(row)].T).

    inputs          floating [rows, in], contiguous rows
    lora_a_weights  slices [max_loras, 1, rank, in] or [max_loras, rank, in] of one form and inputs' type
    output_tensor   floating [slices, rows, rank], contiguous, written whole: base rows become zeros
    the next seven  the step: kernels/vllm/dense/step.py

    Nothing is written where no row has an adapter. Sums are float32; equal inputs give equal bits. Raises
    KernelArgumentError.
    """
    step = Step(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    check_shrink(inputs, lora_a_weights, step)
    check_hidden(output_tensor, inputs, lora_a_weights)
    if step.idle or not inputs.shape[0]:
        return
    if inputs.is_cpu:
        form = reference.shrink
    else:
        from kernels.vllm.dense.launches import shrink as form
    form(output_tensor, inputs, lora_a_weights, step, scaling)


def check_hidden(output_tensor: Tensor, inputs: Tensor, lora_a_weights: Sequence[Tensor]) -> None:
    """What shrink writes. Raises KernelArgumentError."""
    shape = len(lora_a_weights), inputs.shape[0], lora_a_weights[0].shape[-2]
    fits = tuple(output_tensor.shape) == shape and output_tensor.is_contiguous()
    check(
        fits and output_tensor.is_floating_point() and output_tensor.element_size() >= 2,
        "output_tensor",
        f"must be contiguous floating {list(shape)}",
    )
    check_same_device(inputs.device, output_tensor=output_tensor)


def check_shrink(inputs: Tensor, lora_a_weights: Sequence[Tensor], step: Step, *, fp8: bool = False) -> None:
    """fp8: of FP8 weights, whose inputs may have another type. Raises KernelArgumentError."""
    if inputs.dim() != 2 or inputs.stride(1) != 1:
        raise KernelArgumentError("inputs", "must be [rows, in] with contiguous rows")
    first = check_weights(lora_a_weights, "lora_a_weights", fp8=fp8)
    rows, width = inputs.shape
    if first.shape[-1] != width:
        raise KernelArgumentError("inputs", f"have {width} columns, A {first.shape[-1]}")
    if not fp8 and first.dtype != inputs.dtype:
        raise KernelArgumentError("inputs", f"are {inputs.dtype}, lora_a_weights {first.dtype}")
    shape, strides = first.shape, first.stride()
    for s, weight in enumerate(lora_a_weights):
        if weight.shape != shape or weight.stride() != strides:
            problem = "has another shape or other strides than lora_a_weights[0]"
            raise KernelArgumentError(f"lora_a_weights[{s}]", problem)
    check_same_device(inputs.device, lora_a_weights=first)
    step.check(rows, inputs.device)


def check_weights(weights: Sequence[Tensor], argument: str, *, fp8: bool = False) -> Tensor:
    """Slices [max_loras, 1, out, in] or [max_loras, out, in] of one type; the first of them.

    Raises KernelArgumentError. Called for each layer of each step, so words are made for an error alone.
    """
    if not weights:
        raise KernelArgumentError(argument, "holds no slice")
    first = weights[0]
    max_loras, dtype, device = first.shape[0], first.dtype, first.device
    if not (is_fp8(first) if fp8 else dtype.is_floating_point and first.element_size() >= 2):
        raise KernelArgumentError(f"{argument}[0]", f"is {dtype}")
    for s, weight in enumerate(weights):
        shape = weight.shape
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[1] != 1) or shape[0] != max_loras:
            expected = f"[{max_loras}, 1, out, in]"
            problem = f"must be {expected} or without its 1, is {list(shape)}"
            raise KernelArgumentError(f"{argument}[{s}]", problem)
        if weight.dtype != dtype:
            raise KernelArgumentError(f"{argument}[{s}]", f"is {weight.dtype}, the first slice {dtype}")
        if weight.stride(-1) != 1:
            raise KernelArgumentError(f"{argument}[{s}]", "must have contiguous rows")
        if weight.device != device:
            raise KernelArgumentError(f"{argument}[{s}]", f"is on {weight.device}, the first on {device}")
    return first


lora_shrink = register("lora_shrink", _lora_shrink, mutates=("output_tensor",))
