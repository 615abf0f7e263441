"""Sorts expert choices by adapter and expert into blocks, as the vLLM operation of that name does."""

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device
from kernels.vllm.experts import reference
from kernels.vllm.operators import register

_INTEGERS = (torch.int32, torch.int64, torch.uint32)


def _moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    adapter_enabled: Tensor,
    lora_ids: Tensor,
    expert_map: Tensor | None = None,
) -> None:
    """Semantics: for each enabled slot of lora_ids, its pairs p = token * topk + k by (expert(p), p), each
    expert's cut into blocks of block_size.

    topk_ids             int32, int64 or uint32 [tokens, topk]: one that is no expert gets no place
    token_lora_mapping   int32 [tokens or more]: each token's slot, -1: none
    num_experts          experts that topk_ids may name: all of them, also with an expert_map
    max_num_tokens_padded, max_num_m_blocks  places and blocks of each slot; pairs beyond them get no place
    sorted_token_ids     int32 [max_loras * max_num_tokens_padded], written: pairs; places that no pair has
                         hold tokens * topk
    experts_ids          int32 [max_loras * max_num_m_blocks], written: each block's expert, -1: no block
    num_tokens_post_pad  int32 [max_loras], written: places in blocks
    adapter_enabled      integers [max_loras or more]; 0: the slot is not touched
    lora_ids             int32 [any]: slots to sort, each once; numbers that are no slot are passed over
    expert_map           int32 [num_experts]: the expert's number in experts_ids, -1: it is elsewhere

    Rows of slots that are not sorted stay as they are. The order within an expert is that of the pairs: equal
    inputs give equal tables. Raises KernelArgumentError.
    """
    check_align(
        topk_ids, token_lora_mapping, num_experts, block_size, max_loras, max_num_tokens_padded,
        max_num_m_blocks, sorted_token_ids, experts_ids, num_tokens_post_pad, adapter_enabled, lora_ids,
        expert_map,
    )  # fmt: skip
    if topk_ids.is_cpu:
        form = reference.moe_lora_align_block_size
    else:
        from kernels.vllm.experts.align_kernel import moe_lora_align_block_size as form
    form(
        topk_ids, token_lora_mapping, num_experts, block_size, max_loras, max_num_tokens_padded,
        max_num_m_blocks, sorted_token_ids, experts_ids, num_tokens_post_pad, adapter_enabled, lora_ids,
        expert_map,
    )  # fmt: skip


def check_align(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    adapter_enabled: Tensor,
    lora_ids: Tensor,
    expert_map: Tensor | None,
) -> None:
    fits = topk_ids.dim() == 2 and topk_ids.dtype in _INTEGERS and topk_ids.is_contiguous()
    check(fits, "topk_ids", "must be contiguous int32, int64 or uint32 [tokens, topk]")
    for argument, least in (("num_experts", num_experts), ("block_size", block_size)):
        check(least > 0, argument, "must be at least 1")
    sizes = {
        "token_lora_mapping": (token_lora_mapping, topk_ids.shape[0]),
        "sorted_token_ids": (sorted_token_ids, max_loras * max_num_tokens_padded),
        "experts_ids": (experts_ids, max_loras * max_num_m_blocks),
        "num_tokens_post_pad": (num_tokens_post_pad, max_loras),
        "lora_ids": (lora_ids, 0),
    }
    if expert_map is not None:
        sizes["expert_map"] = expert_map, num_experts
    for argument, (tensor, least) in sizes.items():
        fits = tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.numel() >= least
        check(fits, argument, f"must be contiguous int32 with {least} values or more")
        check_same_device(topk_ids.device, **{argument: tensor})
    fits = adapter_enabled.is_contiguous() and adapter_enabled.numel() >= max_loras
    check(fits, "adapter_enabled", f"must be contiguous with {max_loras} values or more")
    check_same_device(topk_ids.device, adapter_enabled=adapter_enabled)


moe_lora_align_block_size = register(
    "moe_lora_align_block_size",
    _moe_lora_align_block_size,
    mutates=("sorted_token_ids", "experts_ids", "num_tokens_post_pad"),
)
