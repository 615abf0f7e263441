"""Alignment: sorts expert choices into blocks of one expert and one adapter."""

import torch
from torch import Tensor

from kernels.launching.checks import check, check_rows
from kernels.launching.moe_blocks import IDLE, MoEBlocks, check_choices, most_blocks
from kernels.metadata.meta import LoRAKernelMeta


def moe_lora_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    meta: LoRAKernelMeta,
    *,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
) -> MoEBlocks:
    """Semantics: pairs p = row * topk + k in the order of (slot(row), expert(p), p), cut into blocks.

    topk_ids     int32 or int64 [rows, topk]: global expert numbers; one outside the experts is nobody's
    num_experts  experts whose weights are here
    block_size   most pairs of a block
    meta         the step's rows and slots; rows without an adapter get no block
    expert_map   int32 [global experts]: the expert's place here, -1: elsewhere (its pairs get no block)
    pad_sorted_ids  False: a slot's pairs start at place topk * lora_token_start_loc and follow each other.
                 True: block b's pairs start at place b * block_size, and unused places hold rows * topk

    Raises KernelArgumentError.
    """
    check_rows(topk_ids, "topk_ids", meta)
    sizes = meta.num_tokens_per_lora[: meta.num_active_loras].tolist()
    slots = meta.lora_ids[: meta.num_active_loras].tolist()
    row_slots = meta.token_lora_mapping
    order = meta.token_indices_sorted_by_lora_ids[: sum(sizes)].long()
    return _align(
        topk_ids, num_experts, block_size, row_slots, order, slots, sizes, meta.max_loras, expert_map,
        pad_sorted_ids,
    )  # fmt: skip


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    *,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
) -> MoEBlocks:
    """The same for the base model: every row is of slot 0."""
    order = torch.arange(len(topk_ids))
    return _align(
        topk_ids, num_experts, block_size, None, order, [0], [len(topk_ids)], 1, expert_map, pad_sorted_ids
    )


def _align(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    row_slots: Tensor | None,
    order: Tensor,
    slots: list[int],
    sizes: list[int],
    num_slots: int,
    expert_map: Tensor | None,
    pad: bool,
) -> MoEBlocks:
    check_choices(topk_ids, num_experts, expert_map)
    check(block_size > 0, "block_size", "must be at least 1")
    experts, topk = local_experts(topk_ids, num_experts, expert_map), topk_ids.shape[1]
    shares = [most_blocks(size * topk, num_experts, block_size) for size in sizes]
    places = sum(shares) * block_size if pad else topk_ids.numel()
    sorted_ids = torch.full((places,), topk_ids.numel(), dtype=torch.int32)
    table = torch.full((sum(shares), 4), IDLE, dtype=torch.int32)
    row = share = 0
    for slot, size, blocks in zip(slots, sizes, shares, strict=True):
        rows = order[row : row + size]
        place, entry = row * topk, share
        for expert in range(num_experts):
            chosen = (experts[rows] == expert).nonzero()
            pairs = (rows[chosen[:, 0]] * topk + chosen[:, 1]).to(torch.int32)
            for first in range(0, len(pairs), block_size):
                part = pairs[first : first + block_size]
                place = entry * block_size if pad else place
                table[entry] = torch.tensor([slot, expert, place, len(part)])
                sorted_ids[place : place + len(part)] = part
                place, entry = place + len(part), entry + 1
        row, share = row + size, share + blocks
    return MoEBlocks(topk_ids, row_slots, num_experts, expert_map, block_size, sorted_ids, table, num_slots)


def local_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """int64 as topk_ids: the expert's place here, -1 where it is elsewhere or none."""
    experts = topk_ids.long()
    known = num_experts if expert_map is None else len(expert_map)
    possible = (experts >= 0) & (experts < known)
    if expert_map is not None:
        experts = expert_map[experts.clamp(0, known - 1)].long()
        possible &= (experts >= 0) & (experts < num_experts)
    return experts.where(possible, -1)
