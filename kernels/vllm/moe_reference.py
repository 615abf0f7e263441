"""Plain torch forms of vLLM's expert operations: the truth of the kernels, and for CPU tensors."""

import torch
from torch import Tensor


def moe_lora_align_block_size(
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
    """The contract is that of kernels/vllm/moe_lora_align.py."""
    experts = _experts_here(topk_ids, num_experts, expert_map)
    places = sorted_token_ids.view(-1)[: max_loras * max_num_tokens_padded].view(max_loras, -1)
    owners = experts_ids.view(-1)[: max_loras * max_num_m_blocks].view(max_loras, -1)
    for slot in lora_ids.tolist():
        if not 0 <= slot < max_loras or not adapter_enabled[slot]:
            continue
        mine = torch.where((token_lora_mapping[: len(topk_ids)] == slot)[:, None], experts, -1).view(-1)
        place, order, of_blocks = 0, [], []
        for expert in range(num_experts):
            pairs = (mine == expert).nonzero().view(-1)
            blocks = -(-len(pairs) // block_size)
            order.append(pairs.new_full((blocks * block_size,), topk_ids.numel()))
            order[-1][: len(pairs)] = pairs
            of_blocks.append(pairs.new_full((blocks,), expert))
            place += blocks * block_size
        places[slot] = _filled(order, max_num_tokens_padded, topk_ids.numel())
        owners[slot] = _filled(of_blocks, max_num_m_blocks, -1)
        num_tokens_post_pad[slot] = place


def _filled(parts: list[Tensor], length: int, other: int) -> Tensor:
    """int32 [length]: the parts one after another, then `other`."""
    there = torch.cat(parts)[:length]
    return torch.cat([there, there.new_full((length - len(there),), other)]).to(torch.int32)


def _experts_here(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """int64 as topk_ids: the expert's number here, -1 where it is elsewhere or none."""
    experts = topk_ids.long()
    possible = (experts >= 0) & (experts < num_experts)
    if expert_map is not None:
        experts = expert_map[experts.clamp(0, num_experts - 1)].long()
        possible &= (experts >= 0) & (experts < num_experts)
    return experts.where(possible, -1)
