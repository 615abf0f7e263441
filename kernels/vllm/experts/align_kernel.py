"""Alignment of expert choices on the GPU, from vLLM's tensors alone. It needs triton."""

from collections.abc import Hashable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.launch import Launch, row_signature

# Pairs that a program places; it compares each with all of them.
_CHUNK = 64
# Up to so many pairs each program counts all of its slot itself: a second launch costs more.
_UNCOUNTED_PAIRS = 1024
# Pairs that are counted at a time, and most groups of them that every program adds up.
_STEP = 512
_MOST_GROUPS = 64
# Values that a program holds in one tile.
_TILE = 4096


@triton.jit
def _active_slot(lora_ids, adapter_enabled, index, max_loras):
    """The slot to sort, or -1: no number of a slot, or one that is disabled."""
    slot = tl.load(lora_ids + index)
    possible = (slot >= 0) & (slot < max_loras)
    enabled = tl.load(adapter_enabled + slot, mask=possible, other=0)
    return tl.where(possible & (enabled != 0), slot, -1)


@triton.jit
def _experts(
    topk_ids, row_slots, expert_map, slot, first, end,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, COUNT: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """int32 [COUNT]: experts of the pairs from `first` on, before `end`; -1: another slot's, or not here."""
    pair = first + tl.arange(0, COUNT)
    there = pair < end
    there = there & (tl.load(row_slots + pair // TOPK, mask=there, other=-1) == slot)
    chosen = tl.load(topk_ids + pair, mask=there, other=0)
    there = there & (chosen >= 0) & (chosen < NUM_EXPERTS)
    expert = chosen.to(tl.int32)
    if HAS_MAP:
        expert = tl.load(expert_map + expert, mask=there, other=-1)
        there = there & (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(there, expert, -1)


@triton.jit
def _count(
    total, topk_ids, row_slots, expert_map, slot, first, end,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Adds to `total` the slot's pairs of each expert, of all pairs from `first` to `end`."""
    for begin in range(first, end, STEP):
        expert = _experts(topk_ids, row_slots, expert_map, slot, begin, end, TOPK, NUM_EXPERTS, STEP, HAS_MAP)
        total += tl.histogram(expert, EXPERTS, expert >= 0)
    return total


@triton.jit(do_not_specialize=["num_pairs", "max_loras", "group"])
def count_kernel(
    counts, topk_ids, row_slots, lora_ids, adapter_enabled, expert_map, num_pairs, max_loras, group,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Program (group, list): counts[list, group] of the slot's pairs by expert."""
    number, index = tl.program_id(0), tl.program_id(1)
    slot = _active_slot(lora_ids, adapter_enabled, index, max_loras)
    if slot < 0:
        return
    first = number * group
    total = _count(
        tl.zeros([EXPERTS], dtype=tl.int32), topk_ids, row_slots, expert_map, slot, first,
        tl.minimum(first + group, num_pairs), TOPK, NUM_EXPERTS, EXPERTS, STEP, HAS_MAP,
    )  # fmt: skip
    at = (index * tl.num_programs(0) + number).to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS)
    tl.store(counts + at, total)


@triton.jit
def _totals(
    counts, topk_ids, row_slots, expert_map, slot, index, first, num_pairs, group,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
    GROUPS: tl.constexpr, COUNTED: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """(the slot's pairs of each expert, those before the pair `first`)."""
    total = tl.zeros([EXPERTS], dtype=tl.int32)
    before = tl.zeros([EXPERTS], dtype=tl.int32)
    if COUNTED:
        groups = tl.cdiv(num_pairs, group)
        own = first // group
        for g in range(0, groups, GROUPS):
            number = g + tl.arange(0, GROUPS)
            at = (index * groups + number)[:, None].to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
            tile = tl.load(counts + at, mask=(number < groups)[:, None], other=0)
            total += tl.sum(tile, 0)
            before += tl.sum(tl.where((number < own)[:, None], tile, 0), 0)
        before = _count(
            before, topk_ids, row_slots, expert_map, slot, own * group, first, TOPK, NUM_EXPERTS, EXPERTS,
            STEP, HAS_MAP,
        )  # fmt: skip
    else:
        before = _count(
            before, topk_ids, row_slots, expert_map, slot, 0, first, TOPK, NUM_EXPERTS, EXPERTS, STEP, HAS_MAP
        )
        total = _count(
            before, topk_ids, row_slots, expert_map, slot, first, num_pairs, TOPK, NUM_EXPERTS, EXPERTS, STEP,
            HAS_MAP,
        )  # fmt: skip
    return total, before


@triton.jit
def _fill(
    places, owners, post_pad, total, number, num_pairs, num_places, num_blocks,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PLACES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The experts of BLOCKS blocks, and of their places those that no pair has."""
    used = tl.cdiv(total, BLOCK)
    ends = tl.cumsum(used, 0)
    block = number * BLOCKS + tl.arange(0, BLOCKS)
    expert = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
    last = (ends - used) * BLOCK + total
    last = tl.where(expert < EXPERTS, tl.gather(last, tl.minimum(expert, EXPERTS - 1), 0), 0)
    tl.store(owners + block, tl.where(expert < EXPERTS, expert, -1), mask=block < num_blocks)
    within = tl.arange(0, BLOCK_PLACES)
    place = block[:, None] * BLOCK + within[None, :]
    free = (place >= last[:, None]) & (within < BLOCK)[None, :] & (place < num_places)
    tl.store(places + place, num_pairs + tl.zeros_like(place), mask=free)
    if number == 0:
        tl.store(post_pad, tl.sum(used, 0) * BLOCK)


@triton.jit(do_not_specialize=["num_pairs", "max_loras", "group", "num_places", "num_blocks", "chunks"])
def align_kernel(
    sorted_ids, expert_ids, post_pad, counts, topk_ids, row_slots, lora_ids, adapter_enabled, expert_map,
    num_pairs, max_loras, group, num_places, num_blocks, chunks,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
    HAS_MAP: tl.constexpr, GROUPS: tl.constexpr, COUNTED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PLACES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (part, list): a part is a chunk of pairs to place, or, after those, blocks to describe.

    Each place is written once: by the pair that has it, or by its block.
    """
    part, index = tl.program_id(0), tl.program_id(1)
    slot = _active_slot(lora_ids, adapter_enabled, index, max_loras)
    if slot < 0:
        return
    describes = part >= chunks
    first = tl.where(describes, 0, part * CHUNK)
    expert = _experts(
        topk_ids, row_slots, expert_map, slot, first, tl.where(describes, 0, num_pairs), TOPK, NUM_EXPERTS,
        CHUNK, HAS_MAP,
    )  # fmt: skip
    valid = expert >= 0
    if (tl.max(expert, 0) < 0) & (part < chunks):
        return
    total, before = _totals(
        counts, topk_ids, row_slots, expert_map, slot, index, first, num_pairs, group, TOPK, NUM_EXPERTS,
        EXPERTS, STEP, GROUPS, COUNTED, HAS_MAP,
    )  # fmt: skip
    places = sorted_ids + slot.to(tl.int64) * num_places
    if describes:
        _fill(
            places, expert_ids + slot.to(tl.int64) * num_blocks, post_pad + slot, total, part - chunks,
            num_pairs, num_places, num_blocks, EXPERTS, BLOCK, BLOCK_PLACES, BLOCKS,
        )  # fmt: skip
    else:
        padded = tl.cdiv(total, BLOCK) * BLOCK
        of, own = tl.maximum(expert, 0), tl.arange(0, CHUNK)
        same = (expert[:, None] == expert[None, :]) & (own[None, :] < own[:, None])
        at = tl.gather(tl.cumsum(padded, 0) - padded + before, of, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(places + at, first + own, mask=valid & (at < num_places))


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
    """The contract is that of kernels/vllm/moe_lora_align.py, where arguments are checked."""
    pairs, mapping = topk_ids.numel(), topk_ids if expert_map is None else expert_map
    # One list more than slots: vLLM's lists begin with -1 where a step has rows without an adapter.
    lists = min(lora_ids.numel(), max_loras + 1)
    if lists == 0 or max_loras == 0:
        return
    group = _STEP * max(1, -(-pairs // (_STEP * _MOST_GROUPS)))
    tables = token_lora_mapping, lora_ids, adapter_enabled
    written = sorted_token_ids, experts_ids, num_tokens_post_pad
    form = tuple((tensor.dtype, tensor.data_ptr() % 16) for tensor in (*tables, *written, mapping))
    counted = pairs > _UNCOUNTED_PAIRS
    key = row_signature(topk_ids), form
    step = _STEP if counted else max(16, triton.next_power_of_2(pairs))
    launches = _launches(
        key, topk_ids.shape[1], num_experts, block_size, expert_map is not None, step, counted
    )
    counts = topk_ids
    if counted:
        groups = -(-pairs // group)
        counts = torch.empty((lists, groups, launches[2]), dtype=torch.int32, device=topk_ids.device)
        launches[0]((groups, lists), counts, topk_ids, *tables, mapping, pairs, max_loras, group)
    chunks = -(-pairs // _CHUNK)
    blocks = max(1, max_num_m_blocks, -(-max_num_tokens_padded // block_size))
    launches[1](
        (chunks + -(-blocks // launches[3]), lists), *written, counts, topk_ids, *tables, mapping, pairs,
        max_loras, group, max_num_tokens_padded, max_num_m_blocks, chunks,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _launches(
    key: Hashable, topk: int, num_experts: int, block_size: int, has_map: bool, step: int, counted: bool
) -> tuple[Launch, Launch, int, int]:
    """(count, align, experts of a row of counts, blocks that a program describes) for tensors as in `key`."""
    experts, places = max(32, triton.next_power_of_2(num_experts)), triton.next_power_of_2(block_size)
    blocks = max(1, min(64, _TILE // experts, _TILE // places))
    common = {
        "TOPK": topk, "NUM_EXPERTS": num_experts, "EXPERTS": experts, "STEP": step, "HAS_MAP": has_map,
    }  # fmt: skip
    align = {
        **common, "GROUPS": max(1, min(64, _TILE // experts)), "COUNTED": counted, "CHUNK": _CHUNK,
        "BLOCK": block_size, "BLOCK_PLACES": places, "BLOCKS": blocks,
    }  # fmt: skip
    options = {"num_warps": 8}
    return Launch(count_kernel, common, options), Launch(align_kernel, align, options), experts, blocks
