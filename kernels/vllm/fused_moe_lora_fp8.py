"""Per-expert LoRA with FP8 weights, by the names and arguments of vLLM's operations of 0.26."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device
from kernels.launching.fp8 import check_card, check_group_k, is_fp8
from kernels.vllm.experts.choices import Choices, check_expand, check_shrink, hidden
from kernels.vllm.fused_moe_lora import exchanged, form_of
from kernels.vllm.operators import register
from kernels.vllm.scaling import UNSCALED, Scaling, row_scales


def _fused_moe_lora_fp8(
    output: Tensor,
    qcurr_hidden_states: Tensor,
    lora_a_stacked: list[Tensor],
    lora_b_stacked: list[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    max_lora_rank: int,
    top_k_num: int,
    lora_ids: Tensor,
    num_active_loras: int,
    adapter_enabled: Tensor,
    shrink_block_size_m: int,
    shrink_block_size_n: int,
    shrink_block_size_k: int,
    shrink_group_size_m: int,
    shrink_num_warps: int,
    shrink_num_stages: int,
    shrink_split_k: int,
    expand_block_size_m: int,
    expand_block_size_n: int,
    expand_block_size_k: int,
    expand_group_size_m: int,
    expand_num_warps: int,
    expand_num_stages: int,
    expand_split_k: int,
    lora_a_scale_stacked: list[Tensor],
    lora_b_scale_stacked: list[Tensor],
    shrink_act_scale: Tensor | None = None,
    expand_act_scale: Tensor | None = None,
    mul_routed_weight: bool = False,
    fully_sharded: bool = False,
    offset: int = 0,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    per_channel_quant: bool = False,
    block_shape: list[int] | None = None,
) -> None:
    """As fused_moe_lora with add_inputs, of values times their scales.

    qcurr_hidden_states  FP8 as lora_a_stacked, or floating
    lora_a_stacked, lora_b_stacked  FP8, with use_fp8_w8a8; else of output's type, and no scale is given
    lora_a_scale_stacked, lora_b_scale_stacked  float32, a slice each. A scale a slot and expert: [max_loras,
                        experts]; with per_channel_quant an output's: [max_loras, experts, outputs, 1]; with
                        block_shape (n, k) a block's: [max_loras, experts, groups of n, groups of k inputs]
    shrink_act_scale    float32: one value, a row's of x [rows, 1], or [rows, groups of k inputs]
    expand_act_scale    the same for the rows between shrink and expand, one a pair

    Between them rows are float32: nothing is quantized again. Raises KernelArgumentError; also for int8 and,
    with e4m3, below sm_89.
    """
    choices = Choices.of(
        lora_a_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        token_lora_mapping, top_k_num, lora_ids, num_active_loras, adapter_enabled, shrink_block_size_m,
    )  # fmt: skip
    x, divide = qcurr_hidden_states, 1 if mul_routed_weight else top_k_num
    check_shrink(x, lora_a_stacked, choices, divide, output.device)
    check_expand(output, lora_b_stacked, choices, topk_weights, offset)
    check(output.dtype in (torch.bfloat16, torch.float16, torch.float32), "output", f"is {output.dtype}")
    quant = _Quantization(use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, per_channel_quant, block_shape)
    quant.check_inputs(x, lora_a_stacked)
    of_a = quant.scaling(
        lora_a_stacked, "lora_a", lora_a_scale_stacked, len(x), shrink_act_scale, "shrink_act_scale", output
    )
    of_b = quant.scaling(
        lora_b_stacked, "lora_b", lora_b_scale_stacked, choices.num_pairs, expand_act_scale,
        "expand_act_scale", output,
    )  # fmt: skip
    rank, whole = lora_a_stacked[0].shape[2], lora_b_stacked[0].shape[3]
    check(rank == max_lora_rank, "max_lora_rank", f"is {max_lora_rank}, the rank of lora_a_stacked {rank}")
    y, routed = output.view(choices.num_pairs, output.shape[2]), topk_weights if mul_routed_weight else None
    form = form_of(output)
    if not fully_sharded:
        check(rank == whole, "lora_b_stacked", f"has not the rank {rank} of lora_a_stacked")
        form.fused(y, x, lora_a_stacked, lora_b_stacked, choices, divide, offset, routed, True, of_a, of_b)
        return
    check(shrink_block_size_m == expand_block_size_m, "expand_block_size_m", "is not shrink_block_size_m")
    shape = (len(lora_a_stacked), *topk_weights.shape, rank)
    h = torch.zeros(shape, dtype=output.dtype, device=output.device)
    form.shrink(h.flatten(1, 2), x, lora_a_stacked, choices, divide, False, of_a)
    h = exchanged(h, rank == whole).flatten(1, 2)
    form.expand(y, h, lora_b_stacked, choices, offset, routed, True, False, of_b)


def _fused_moe_lora_shrink_fp8(
    a_intermediate_cache1: Tensor,
    qcurr_hidden_states: Tensor,
    lora_a_stacked: list[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    top_k_num: int,
    lora_ids: Tensor,
    adapter_enabled: Tensor,
    device: torch.device,
    N: int,
    M: int,
    EM: int,
    K: int,
    num_tokens: int,
    num_experts: int,
    num_slices: int,
    block_size_m: int,
    block_size_n: int,
    block_size_k: int,
    group_size_m: int,
    num_warps: int,
    num_stages: int,
    split_k: int,
    num_active_loras: int,
    lora_a_scale_stacked: list[Tensor],
    mul_routed_weight: bool = False,
    use_gdc: bool = False,
    act_scale: Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    per_channel_quant: bool = False,
    block_shape: list[int] | None = None,
) -> None:
    """As fused_moe_lora_shrink, with the scales of fused_moe_lora_fp8."""
    choices = Choices.of(
        lora_a_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        token_lora_mapping, top_k_num, lora_ids, num_active_loras, adapter_enabled, block_size_m,
    )  # fmt: skip
    x, divide = qcurr_hidden_states, 1 if mul_routed_weight else top_k_num
    check_shrink(x, lora_a_stacked, choices, divide, a_intermediate_cache1.device)
    h = hidden(a_intermediate_cache1, choices, False, len(lora_a_stacked), lora_a_stacked[0].shape[2])
    quant = _Quantization(use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, per_channel_quant, block_shape)
    quant.check_inputs(x, lora_a_stacked)
    of = quant.scaling(lora_a_stacked, "lora_a", lora_a_scale_stacked, len(x), act_scale, "act_scale", h)
    form_of(h).shrink(h, x, lora_a_stacked, choices, divide, False, of)


def _fused_moe_lora_expand_fp8(
    output: Tensor,
    a_intermediate_cache1: Tensor,
    lora_b_stacked: list[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor,
    top_k_num: int,
    lora_ids: Tensor,
    adapter_enabled: Tensor,
    device: torch.device,
    N: int,
    M: int,
    EM: int,
    K: int,
    num_tokens: int,
    num_experts: int,
    num_slices: int,
    max_lora_rank: int,
    w1_output_dim_size: int,
    block_size_m: int,
    block_size_n: int,
    block_size_k: int,
    group_size_m: int,
    num_warps: int,
    num_stages: int,
    split_k: int,
    num_active_loras: int,
    lora_b_scale_stacked: list[Tensor],
    mul_routed_weight: bool = False,
    offset: int = 0,
    use_gdc: bool = False,
    act_scale: Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    per_channel_quant: bool = False,
    block_shape: list[int] | None = None,
) -> None:
    """As fused_moe_lora_expand, with the scales of fused_moe_lora_fp8."""
    choices = Choices.of(
        lora_b_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        token_lora_mapping, top_k_num, lora_ids, num_active_loras, adapter_enabled, block_size_m,
    )  # fmt: skip
    check_expand(output, lora_b_stacked, choices, topk_weights, offset)
    h = hidden(a_intermediate_cache1, choices, False, len(lora_b_stacked), lora_b_stacked[0].shape[3])
    check_same_device(output.device, a_intermediate_cache1=h)
    quant = _Quantization(use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, per_channel_quant, block_shape)
    of = quant.scaling(
        lora_b_stacked, "lora_b", lora_b_scale_stacked, choices.num_pairs, act_scale, "act_scale", output
    )
    y, routed = output.view(choices.num_pairs, output.shape[2]), topk_weights if mul_routed_weight else None
    form_of(h).expand(y, h, lora_b_stacked, choices, offset, routed, True, False, of)


class _Quantization:
    """What the flags say of scales."""

    def __init__(
        self, fp8: bool, int8: bool, int8_weights: bool, per_channel: bool, block_shape: list[int] | None
    ) -> None:
        check(not int8, "use_int8_w8a8", "is not served: weights are FP8 or of output's type")
        check(not int8_weights, "use_int8_w8a16", "is not served: weights are FP8 or of output's type")
        self._fp8 = fp8
        self._group = (1, 0) if per_channel else (0, 0)
        if block_shape is not None:
            fits = len(block_shape) == 2 and min(block_shape) > 0 and not per_channel
            check(fits, "block_shape", "must be two sizes, without per_channel_quant")
            self._group = (block_shape[0], block_shape[1])

    def check_inputs(self, x: Tensor, stack: Sequence[Tensor]) -> None:
        """FP8 rows are of the weights' type; FP8 weights are served with others, too."""
        fits = x.dtype == stack[0].dtype or (self._fp8 and x.is_floating_point() and not is_fp8(x))
        check(fits, "qcurr_hidden_states", f"is {x.dtype}, lora_a_stacked {stack[0].dtype}")

    def scaling(
        self,
        stack: Sequence[Tensor],
        name: str,
        scales: Sequence[Tensor],
        num_rows: int,
        rows: Tensor | None,
        named: str,
        like: Tensor,
    ) -> Scaling:
        """Of the stack that is called `name`, and of num_rows rows, whose scales are called `named`."""
        of_weights = f"{name}_scale_stacked"
        if not self._fp8:
            check(stack[0].dtype == like.dtype, f"{name}_stacked", f"is {stack[0].dtype}, not {like.dtype}")
            check(not scales, of_weights, "is given without use_fp8_w8a8")
            check(rows is None, named, "is given without use_fp8_w8a8")
            return UNSCALED
        check(is_fp8(stack[0]), f"{name}_stacked", f"must be FP8 with use_fp8_w8a8, is {stack[0].dtype}")
        check_card(stack[0], f"{name}_stacked")
        check(
            len(scales) == len(stack), of_weights, f"holds {len(scales)} slices, {name}_stacked {len(stack)}"
        )
        outputs, inputs = (size or whole for size, whole in zip(self._group, stack[0].shape[2:], strict=True))
        groups = -(-stack[0].shape[2] // outputs), -(-stack[0].shape[3] // inputs)
        weights = tuple(
            _four_dimensional(each, f"{of_weights}[{index}]", (*stack[0].shape[:2], *groups))
            for index, each in enumerate(scales)
        )
        check(len({each.stride() for each in weights}) == 1, of_weights, "has slices of other strides")
        check_same_device(like.device, **{of_weights: weights[0]})
        if groups[1] > 1:
            check_group_k(self._group[1])
        rows = None if rows is None else row_scales(rows, named, num_rows, groups[1], like.device)
        return Scaling(weights, rows, *self._group)


def _four_dimensional(scales: Tensor, argument: str, shape: tuple[int, ...]) -> Tensor:
    """[max_loras, experts, output groups, input groups]; one scale for all may leave its dimensions out."""
    whole = scales
    while whole.dim() < 4 and scales.shape == shape[: scales.dim()] and set(shape[scales.dim() :]) == {1}:
        whole = whole.unsqueeze(-1)
    if whole.shape != shape or scales.dtype != torch.float32:
        problem = f"must be float32 {list(shape)}, is {scales.dtype} {list(scales.shape)}"
        raise KernelArgumentError(argument, problem)
    return whole


fused_moe_lora_fp8 = register("fused_moe_lora_fp8", _fused_moe_lora_fp8, mutates=("output",))
fused_moe_lora_shrink_fp8 = register(
    "fused_moe_lora_shrink_fp8", _fused_moe_lora_shrink_fp8, mutates=("a_intermediate_cache1",)
)
fused_moe_lora_expand_fp8 = register(
    "fused_moe_lora_expand_fp8", _fused_moe_lora_expand_fp8, mutates=("output",)
)
