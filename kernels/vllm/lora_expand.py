"""lora_expand of the reference API: from rank space back into output columns."""

from collections.abc import Sequence

from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device
from kernels.launching.fp8 import is_fp8
from kernels.vllm.dense import reference
from kernels.vllm.dense.step import Step
from kernels.vllm.lora_shrink import check_weights
from kernels.vllm.operators import register


def _lora_expand(
    inputs: Tensor,
    lora_b_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: Tensor,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """Semantics: output_tensor[row, start_s : start_s + out_s] += inputs[s, row] @ B[s, slot].T.

    inputs          floating [slices, rows, rank], contiguous; rounded to the weights' type where several rows
                    share an adapter
    lora_b_weights  slices [max_loras, 1, out_s, rank] or [max_loras, out_s, rank] of one type
    output_tensor   floating [rows, columns], contiguous rows; rows without an adapter and other columns stay
    the next seven  the step: kernels/vllm/dense/step.py
    offset_start    the first slice's first column; the others follow
    add_inputs      False: columns of rows with an adapter are overwritten

    Nothing is written where no row has an adapter. Sums are float32, rounded once. Raises
    KernelArgumentError.
    """
    step = Step(
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, num_active_loras,
    )  # fmt: skip
    rows = check_expand(output_tensor, lora_b_weights, offset_start, step)
    shape = len(lora_b_weights), rows, lora_b_weights[0].shape[-1]
    fits = tuple(inputs.shape) == shape and inputs.is_contiguous() and inputs.is_floating_point()
    check(fits, "inputs", f"must be contiguous floating {list(shape)}")
    check_same_device(output_tensor.device, inputs=inputs)
    if step.idle or not rows:
        return
    if output_tensor.is_cpu:
        form = reference.expand
    else:
        from kernels.vllm.dense.launches import expand as form
    form(output_tensor, inputs, lora_b_weights, step, offset_start, add_inputs=add_inputs)


def check_expand(
    output: Tensor, lora_b_weights: Sequence[Tensor], offset: int, step: Step, *, fp8: bool = False
) -> int:
    """The number of rows. fp8: of FP8 weights. Raises KernelArgumentError."""
    if output.dim() != 2 or output.stride(1) != 1 or not output.dtype.is_floating_point or is_fp8(output):
        raise KernelArgumentError("output_tensor", "must be floating [rows, columns] with contiguous rows")
    first, end = check_weights(lora_b_weights, "lora_b_weights", fp8=fp8), offset
    rank, stride = first.shape[-1], first.stride(-2)
    for s, weight in enumerate(lora_b_weights):
        if weight.shape[-1] != rank or weight.stride(-2) != stride:
            problem = "has another rank or another stride of rows than the first slice"
            raise KernelArgumentError(f"lora_b_weights[{s}]", problem)
        end += weight.shape[-2]
    rows, columns = output.shape
    if offset < 0 or end > columns:
        problem = f"has {columns} columns, the slices take [{offset}, {end})"
        raise KernelArgumentError("output_tensor", problem)
    check_same_device(output.device, lora_b_weights=first)
    step.check(rows, output.device)
    return rows


lora_expand = register("lora_expand", _lora_expand, mutates=("output_tensor",))
