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
    check(inputs.dim() == 2 and inputs.stride(1) == 1, "inputs", "must be [rows, in] with contiguous rows")
    check_weights(lora_a_weights, "lora_a_weights", fp8=fp8)
    first = lora_a_weights[0]
    check(
        first.shape[-1] == inputs.shape[1], "inputs", f"have {inputs.shape[1]} columns, A {first.shape[-1]}"
    )
    check(fp8 or first.dtype == inputs.dtype, "inputs", f"are {inputs.dtype}, lora_a_weights {first.dtype}")
    for s, weight in enumerate(lora_a_weights):
        alike = weight.shape == first.shape and weight.stride() == first.stride()
        check(alike, f"lora_a_weights[{s}]", "has another shape or other strides than lora_a_weights[0]")
    check_same_device(inputs.device, lora_a_weights=first)
    step.check(inputs.shape[0], inputs.device)


def check_weights(weights: Sequence[Tensor], argument: str, *, fp8: bool = False) -> None:
    """Slices [max_loras, 1, out, in] or [max_loras, out, in] of one type. Raises KernelArgumentError."""
    check(len(weights) > 0, argument, "holds no slice")
    for s, weight in enumerate(weights):
        name, shape = f"{argument}[{s}]", tuple(weight.shape)
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[1] != 1) or shape[0] != weights[0].shape[0]:
            expected = f"[{weights[0].shape[0]}, 1, out, in]"
            raise KernelArgumentError(name, f"must be {expected} or without its 1, is {list(shape)}")
        served = is_fp8(weight) if fp8 else weight.is_floating_point() and weight.element_size() >= 2
        check(served, name, f"is {weight.dtype}")
        check(
            weight.dtype == weights[0].dtype, name, f"is {weight.dtype}, the first slice {weights[0].dtype}"
        )
        check(weight.stride(-1) == 1, name, "must have contiguous rows")
        check(
            weight.device == weights[0].device,
            name,
            f"is on {weight.device}, the first on {weights[0].device}",
        )


lora_shrink = register("lora_shrink", _lora_shrink, mutates=("output_tensor",))
