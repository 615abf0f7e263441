"""lora_shrink_fp8 of the reference API: rows into their adapters' rank space, with FP8 weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.vllm.dense import reference_fp8
from kernels.vllm.dense.quantization import Quantization, check_unscaled, with_experts
from kernels.vllm.dense.step import Step
from kernels.vllm.lora_shrink import check_hidden, check_shrink, lora_shrink
from kernels.vllm.operators import register


def _lora_shrink_fp8(
    inputs: Tensor,
    lora_a_weights: Sequence[Tensor],
    output_tensor: Tensor,
    token_lora_mapping: Tensor,
    token_indices_sorted_by_lora_ids: Tensor,
    num_tokens_per_lora: Tensor,
    lora_token_start_loc: Tensor,
    lora_ids: Tensor,
    no_lora_flag_cpu: Tensor,
    num_active_loras: int,
    scaling: float,
    b_scale: Sequence[Tensor],
    a_scale: Tensor | None = None,
    group_k: int = 0,
    group_n: int = 0,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
) -> None:
    """As lora_shrink, of values times their scales.

    inputs          FP8, or floating
    lora_a_weights  FP8 of one type, with use_fp8_w8a8; else this is lora_shrink, and no scale is given
    b_scale         contiguous float32, a slice each. A scale a slot: [max_loras]; with per_channel_quant a
                    rank's: [max_loras, rank]; with group_n and group_k a block's: [max_loras, groups of
                    group_n ranks, groups of group_k inputs]. Sizes of 1 may be left out or stand between
    a_scale         float32: one value, a row's [rows, 1], or [rows, groups of group_k inputs]; None: 1
    group_k         a power of 2 from 32 up, where there is more than one group

    Raises KernelArgumentError; also with e4m3 below sm_89.
    """
    active = torch.tensor([num_active_loras], dtype=torch.int32)
    seven = (
        token_lora_mapping, token_indices_sorted_by_lora_ids, num_tokens_per_lora, lora_token_start_loc,
        lora_ids, no_lora_flag_cpu, active,
    )  # fmt: skip
    if not use_fp8_w8a8:
        check_unscaled(b_scale, a_scale)
        lora_shrink(inputs, lora_a_weights, output_tensor, *seven, scaling)
        return
    step = Step(*seven)
    check_shrink(inputs, lora_a_weights, step, fp8=True)
    check_hidden(output_tensor, inputs, lora_a_weights)
    lora_a = with_experts(lora_a_weights)
    quantization = Quantization(group_k, group_n, per_channel_quant)
    of = quantization.scaling(lora_a, "lora_a_weights", b_scale, inputs, a_scale)
    if step.idle or not inputs.shape[0]:
        return
    if inputs.is_cpu:
        form = reference_fp8.shrink
    else:
        from kernels.vllm.dense.fp8_launches import shrink as form
    form(output_tensor, inputs, lora_a, step, scaling, of)


lora_shrink_fp8 = register("lora_shrink_fp8", _lora_shrink_fp8, mutates=("output_tensor",))
