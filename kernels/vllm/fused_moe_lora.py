"""Per-expert LoRA by the names and arguments of vLLM's operations of 0.26."""

from types import ModuleType

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device
from kernels.vllm.experts import reference
from kernels.vllm.experts.choices import Choices, check_expand, check_shrink, hidden
from kernels.vllm.operators import register


def _fused_moe_lora(
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
    num_active_loras: Tensor,
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
    mul_routed_weight: bool = False,
    fully_sharded: bool = False,
    offset: int = 0,
    add_inputs: bool = True,
) -> None:
    """Semantics: output[t, k, offset + s * out :][:out] += w[t, k] * x[row] @ A_s[l, e].T @ B_s[l, e].T.

    output               floating [tokens, topk, columns], in place. Pairs without an enabled slot stay
    qcurr_hidden_states  [tokens, in or more]; with mul_routed_weight a row a pair
    lora_a_stacked       of each slice [max_loras, experts, rank, in]
    lora_b_stacked       of each slice [max_loras, experts, out, rank], scale included
    topk_weights         [tokens, topk]: w with mul_routed_weight; else w is 1
    sorted_token_ids, expert_ids, num_tokens_post_padded  [max_loras, ...] of moe_lora_align_block_size, or
                         None, [tokens * topk] and None: each pair by itself, its slot from token_lora_mapping
    lora_ids, num_active_loras  the first so many entries are served; those that are no slot are passed over
    adapter_enabled      integers [max_loras or more]; 0: the slot is not served
    shrink_block_size_m  the block size of the alignment. The other sizes are vLLM's tuning: accepted, unused
    fully_sharded        A is a share of the rank or of the inputs: the ranks of a group exchange what shrink
                         computed, by vLLM's own collectives
    add_inputs           False: = in place of +=

    Sums are float32, and output is rounded once. Raises KernelArgumentError.
    """
    choices = Choices.of(
        lora_a_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        token_lora_mapping, top_k_num, lora_ids, num_listed(num_active_loras), adapter_enabled,
        shrink_block_size_m,
    )  # fmt: skip
    x, divide = qcurr_hidden_states, 1 if mul_routed_weight else top_k_num
    check_shrink(x, lora_a_stacked, choices, divide, output.device)
    check_expand(output, lora_b_stacked, choices, topk_weights, offset)
    for argument, tensor in (("qcurr_hidden_states", x), ("lora_b_stacked", lora_b_stacked[0])):
        check(tensor.dtype == output.dtype, argument, f"is {tensor.dtype}, output {output.dtype}")
    rank = lora_a_stacked[0].shape[2]
    check(rank == max_lora_rank, "max_lora_rank", f"is {max_lora_rank}, the rank of lora_a_stacked {rank}")
    y, routed = output.view(choices.num_pairs, output.shape[2]), topk_weights if mul_routed_weight else None
    form = form_of(output)
    if not fully_sharded:
        same = rank == lora_b_stacked[0].shape[3]
        check(same, "lora_b_stacked", f"has not the rank {rank} of lora_a_stacked")
        form.fused(y, x, lora_a_stacked, lora_b_stacked, choices, divide, offset, routed, add_inputs)
        return
    check(add_inputs, "add_inputs", "must be True where fully_sharded is")
    check(shrink_block_size_m == expand_block_size_m, "expand_block_size_m", "is not shrink_block_size_m")
    shape = (len(lora_a_stacked), *topk_weights.shape, rank)
    h = torch.zeros(shape, dtype=output.dtype, device=output.device)
    form.shrink(h.flatten(1, 2), x, lora_a_stacked, choices, divide, False)
    h = exchanged(h, rank == lora_b_stacked[0].shape[3]).flatten(1, 2)
    form.expand(y, h, lora_b_stacked, choices, offset, routed, True, False)


def _fused_moe_lora_shrink(
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
    num_active_loras: Tensor,
    mul_routed_weight: bool = False,
    use_gdc: bool = False,
    use_tma: bool = False,
) -> None:
    """Semantics: a_intermediate_cache1[s, t, k] = x[row] @ A_s[slot, e].T; pairs without a slot stay.

    The arguments are fused_moe_lora's. Those of sizes say again what the tensors' shapes say: shapes count.
    a_intermediate_cache1  contiguous [slices, tokens, topk, rank]; with use_tma and sorted_token_ids [slices,
    max_loras, EM, rank], by place: row (slot, i) is of the pair at sorted_token_ids[slot, i]
    """
    choices = Choices.of(
        lora_a_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        token_lora_mapping, top_k_num, lora_ids, num_listed(num_active_loras), adapter_enabled, block_size_m,
    )  # fmt: skip
    x, divide = qcurr_hidden_states, 1 if mul_routed_weight else top_k_num
    by_place = use_tma and sorted_token_ids is not None
    check_shrink(x, lora_a_stacked, choices, divide, a_intermediate_cache1.device)
    same = x.dtype == lora_a_stacked[0].dtype
    check(same, "qcurr_hidden_states", f"is {x.dtype}, lora_a_stacked {lora_a_stacked[0].dtype}")
    h = hidden(a_intermediate_cache1, choices, by_place, len(lora_a_stacked), lora_a_stacked[0].shape[2])
    form_of(h).shrink(h, x, lora_a_stacked, choices, divide, by_place)


def _fused_moe_lora_expand(
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
    num_active_loras: Tensor,
    mul_routed_weight: bool = False,
    offset: int = 0,
    use_gdc: bool = False,
    use_tma: bool = False,
    add_inputs: bool = True,
) -> None:
    """Semantics: output[t, k, offset + s * out :][:out] += w[t, k] * a_intermediate_cache1[s, t, k] @ B_s.T.

    The arguments are those of fused_moe_lora and of fused_moe_lora_shrink, whose result it takes; add_inputs
    came with 0.33.
    """
    choices = Choices.of(
        lora_b_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        token_lora_mapping, top_k_num, lora_ids, num_listed(num_active_loras), adapter_enabled, block_size_m,
    )  # fmt: skip
    by_place = use_tma and sorted_token_ids is not None
    check_expand(output, lora_b_stacked, choices, topk_weights, offset)
    check(output.dtype == lora_b_stacked[0].dtype, "output", "is not of the type of lora_b_stacked")
    h = hidden(a_intermediate_cache1, choices, by_place, len(lora_b_stacked), lora_b_stacked[0].shape[3])
    check_same_device(output.device, a_intermediate_cache1=h)
    y, routed = output.view(choices.num_pairs, output.shape[2]), topk_weights if mul_routed_weight else None
    form_of(h).expand(y, h, lora_b_stacked, choices, offset, routed, add_inputs, by_place)


def form_of(tensor: Tensor) -> ModuleType:
    """The module whose shrink, expand and fused serve the tensor's device."""
    if tensor.is_cpu:
        return reference
    from kernels.vllm.experts import launch

    return launch


def num_listed(num_active_loras: Tensor) -> int:
    """How many entries of lora_ids are served. It is the host's: a GPU's would have to be waited for."""
    check(num_active_loras.is_cpu, "num_active_loras", "must be on the CPU")
    return int(num_active_loras)


def exchanged(h: Tensor, whole_rank: bool) -> Tensor:
    """What all ranks of a tensor-parallel group computed of h: the sum of shares of the inputs, or, where a
    rank of the group has not the whole LoRA rank, its shares one after another. Runs in vLLM alone."""
    from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

    exchange = tensor_model_parallel_all_reduce if whole_rank else tensor_model_parallel_all_gather
    exchanged_h: Tensor = exchange(h)
    return exchanged_h


fused_moe_lora = register("fused_moe_lora", _fused_moe_lora, mutates=("output",))
fused_moe_lora_shrink = register(
    "fused_moe_lora_shrink", _fused_moe_lora_shrink, mutates=("a_intermediate_cache1",)
)
fused_moe_lora_expand = register("fused_moe_lora_expand", _fused_moe_lora_expand, mutates=("output",))
