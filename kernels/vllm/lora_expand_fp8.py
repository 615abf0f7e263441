"""lora_expand_fp8 of the reference API: from rank space into output columns, with FP8 weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device
from kernels.vllm.dense import reference_fp8
from kernels.vllm.dense.quantization import Quantization, check_unscaled, with_experts
from kernels.vllm.dense.step import Step
from kernels.vllm.lora_expand import check_expand, lora_expand
from kernels.vllm.operators import register


def _lora_expand_fp8(
    inputs: Tensor,
    lora_b_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: int,
    b_scale: Sequence[Tensor],
    a_scale: Tensor | None = None,
    offset_start: int = 0,
    add_inputs: bool = False,
    group_k: int = 0,
    group_n: int = 0,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
) -> None:
    """As lora_expand, of values times their scales.

    inputs          FP8, or floating: float32 is rounded to output_tensor's type
    lora_b_weights  FP8 of one type, with use_fp8_w8a8; else this is lora_expand, and no scale is given
    b_scale         as in lora_shrink_fp8: [max_loras]; with per_channel_quant a column's [max_loras, out_s];
                    or [max_loras, groups of group_n columns, groups of group_k ranks]
    a_scale         float32 and of all slices: one value, a row's [rows, 1], or [rows, groups of group_k
                    ranks]; None: 1

    Raises KernelArgumentError; also with e4m3 below sm_89.
    """
    active = torch.tensor([num_active_loras], dtype=torch.int32)
    seven = (
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, active,
    )  # fmt: skip
    if not use_fp8_w8a8:
        check_unscaled(b_scale, a_scale)
        lora_expand(inputs, lora_b_weights, output_tensor, *seven, offset_start, add_inputs)
        return
    step = Step(*seven)
    rows = check_expand(output_tensor, lora_b_weights, offset_start, step, fp8=True)
    shape = len(lora_b_weights), rows, lora_b_weights[0].shape[-1]
    fits = tuple(inputs.shape) == shape and inputs.is_contiguous()
    check(fits, "inputs", f"must be contiguous {list(shape)}")
    check_same_device(output_tensor.device, inputs=inputs)
    lora_b = with_experts(lora_b_weights)
    quantization = Quantization(group_k, group_n, per_channel_quant)
    of = quantization.scaling(lora_b, "lora_b_weights", b_scale, inputs, a_scale)
    if step.idle or not rows:
        return
    if output_tensor.is_cpu:
        form = reference_fp8.expand
    else:
        from kernels.vllm.dense.fp8_launches import expand as form
    form(output_tensor, inputs, lora_b, step, offset_start, of, add_inputs=add_inputs)


lora_expand_fp8 = register("lora_expand_fp8", _lora_expand_fp8, mutates=("output_tensor",))
