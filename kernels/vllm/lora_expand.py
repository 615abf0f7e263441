"""lora_expand of the reference API: from rank space back into output columns."""

from collections.abc import Sequence

from torch import Tensor

from kernels.launching.checks import check, check_same_device
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
    fits = output.dim() == 2 and output.stride(1) == 1
    fits = fits and output.is_floating_point() and output.element_size() >= 2
    check(fits, "output_tensor", "must be floating [rows, columns] with contiguous rows")
    check_weights(lora_b_weights, "lora_b_weights", fp8=fp8)
    first, end = lora_b_weights[0], offset
    for s, weight in enumerate(lora_b_weights):
        alike = weight.shape[-1] == first.shape[-1] and weight.stride(-2) == first.stride(-2)
        check(
            alike, f"lora_b_weights[{s}]", "has another rank or another stride of rows than the first slice"
        )
        end += weight.shape[-2]
    fits = offset >= 0 and end <= output.shape[1]
    check(fits, "output_tensor", f"has {output.shape[1]} columns, the slices take [{offset}, {end})")
    check_same_device(output.device, lora_b_weights=first)
    step.check(output.shape[0], output.device)
    return output.shape[0]


lora_expand = register("lora_expand", _lora_expand, mutates=("output_tensor",))
