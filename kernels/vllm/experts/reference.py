"""Plain torch forms of vLLM's expert operations: the truth of the kernels, and for CPU tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.vllm.experts.choices import Choices
from kernels.vllm.scaling import UNSCALED, Scaling


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


def shrink(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    choices: Choices,
    divide: int,
    by_place: bool,
    of: Scaling = UNSCALED,
) -> None:
    """Semantics: h[s, row(p)] = x[p // divide] @ A_s[slot, e].T for every pair p of a slot.

    h is [slices, rows, rank]: row(p) is p, or by_place slot * places + place. Rows of no pair stay. Columns
    of x that A has not are padding.
    """
    for slot, expert, places, pairs in choices.blocks():
        rows = slot * choices.places + places if by_place else pairs
        taken = of.row(x[:, : lora_a[0].shape[3]], pairs // divide)
        for s in range(len(lora_a)):
            h[s, rows] = (taken @ of.weight(lora_a, s, slot, expert).T).to(h.dtype)


def expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    choices: Choices,
    start: int,
    routed: Tensor | None,
    add_inputs: bool,
    by_place: bool,
    of: Scaling = UNSCALED,
) -> None:
    """Semantics: y[p, start + s * out :][:out] += w[p] * h[s, row(p)] @ B_s[slot, e].T.

    y is [pairs, columns]. Without add_inputs = in place of +=. Sums are float32, and y is rounded once.
    """
    out = lora_b[0].shape[2]
    for slot, expert, places, pairs in choices.blocks():
        rows = slot * choices.places + places if by_place else pairs
        for s in range(len(lora_b)):
            columns = slice(start + s * out, start + (s + 1) * out)
            delta = of.row(h[s], rows) @ of.weight(lora_b, s, slot, expert).T
            if routed is not None:
                delta = delta * routed.view(-1)[pairs, None].float()
            y[pairs, columns] = (delta + y[pairs, columns].float() if add_inputs else delta).to(y.dtype)


def fused(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    choices: Choices,
    divide: int,
    start: int,
    routed: Tensor | None,
    add_inputs: bool,
    of_a: Scaling = UNSCALED,
    of_b: Scaling = UNSCALED,
) -> None:
    """Shrink, then expand, with float32 between them."""
    shape = (len(lora_a), choices.num_pairs, lora_a[0].shape[2])
    h = torch.zeros(shape, dtype=torch.float32)
    shrink(h, x, lora_a, choices, divide, False, of_a)
    expand(y, h, lora_b, choices, start, routed, add_inputs, False, of_b)
