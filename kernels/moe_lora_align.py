"""Alignment of expert choices on the GPU. The truth is kernels/reference/moe_lora_align.py."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_rows
from kernels.launching.launch import Launch, row_signature
from kernels.launching.moe_blocks import MoEBlocks, check_choices
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.device import has_dependent_launch, let_next_kernel_start, wait_for_former_kernel

# Pairs of a program, which compares each with all.
_MOST_PAIRS = 64
# Up to so many pairs each program counts its slot's other pairs itself: a second launch costs more.
_UNCOUNTED_PAIRS = 1024
# Pairs that are counted together: every program reads its slot's counts, and counts again those of its own
# group. Counted in chunks of 64, 16384 pairs of one slot and 128 experts made each of 256 programs read
# 128 KB (27.7 us).
_GROUP_PAIRS = 512
# Fewer slots than these are not compiled for: each program looks through them all.
_LEAST_SLOTS = 64
# Counts that a program holds at a time.
_COUNTS = 4096


@triton.jit
def _of(values, index, wanted):
    """values[wanted], or 0 beyond the end."""
    return tl.sum(tl.where(index == wanted, values, 0), 0)


@triton.jit
def _slot_sizes(
    slot_rows,
    num_pairs,
    TOPK: tl.constexpr,
    MAX_LORAS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_LORA: tl.constexpr,
):
    """int32 [SLOTS]: pairs of the active slots, at most SLOTS, in their order. Without LoRA all pairs are of
    one slot."""
    index = tl.arange(0, SLOTS)
    if HAS_LORA:
        return tl.load(slot_rows + index, mask=index < MAX_LORAS, other=0) * TOPK
    else:
        return tl.where(index == 0, num_pairs, 0)


@triton.jit
def _chunk(pairs, number, CHUNK: tl.constexpr, SLOTS: tl.constexpr):
    """(place of the slot, number within it, the slot's pairs, pairs before) of the `number`-th chunk."""
    index = tl.arange(0, SLOTS)
    chunks = tl.cdiv(pairs, CHUNK)
    place = tl.sum((tl.cumsum(chunks, 0) <= number).to(tl.int32), 0)
    within = number - tl.sum(tl.where(index < place, chunks, 0), 0)
    before = tl.sum(tl.where(index < place, pairs, 0), 0)
    return place, within, _of(pairs, index, place), before


@triton.jit
def _experts(
    topk_ids, order, expert_map, first, size, before, known,
    TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr, COUNT: tl.constexpr, HAS_LORA: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """(numbers in the slot, pair numbers, experts) of COUNT of a slot's pairs; expert -1: not one here."""
    j = first + tl.arange(0, COUNT)
    there = j < size
    row = (before + j) // TOPK
    if HAS_LORA:
        row = tl.load(order + row, mask=there, other=0)
    pair = row * TOPK + j % TOPK
    expert = tl.load(topk_ids + pair, mask=there, other=-1).to(tl.int32)
    if HAS_MAP:
        mapped = there & (expert >= 0) & (expert < known)
        expert = tl.load(expert_map + expert, mask=mapped, other=-1)
    return j, pair, tl.where(there & (expert >= 0) & (expert < NUM_EXPERTS), expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "known"])
def count_kernel(
    counts, topk_ids, order, slot_rows, expert_map, num_pairs, known,
    TOPK: tl.constexpr, MAX_LORAS: tl.constexpr, SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, HAS_LORA: tl.constexpr, HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """counts[group, expert] = the pairs of that expert among a group of GROUP pairs of one slot."""
    wait_for_former_kernel(PDL)
    let_next_kernel_start(PDL)
    number = tl.program_id(0)
    pairs = _slot_sizes(slot_rows, num_pairs, TOPK, MAX_LORAS, SLOTS, HAS_LORA)
    _place, within, size, before = _chunk(pairs, number, GROUP, SLOTS)
    _j, _pair, expert = _experts(
        topk_ids, order, expert_map, within * GROUP, size, before, known, TOPK, NUM_EXPERTS, GROUP, HAS_LORA,
        HAS_MAP,
    )  # fmt: skip
    found = tl.histogram(expert, EXPERTS, expert >= 0)
    tl.store(counts + number * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit
def _set_idle(blocks, first, last):
    for start in range(first, last, 256):
        entry = start + tl.arange(0, 256)
        tl.store(blocks + entry * 4, tl.full([256], -1, tl.int32), mask=entry < last)


@triton.jit(do_not_specialize=["num_pairs", "known", "num_entries"])
def align_kernel(
    sorted_ids, blocks, counts, topk_ids, order, slot_rows, lora_ids, expert_map, num_pairs, known,
    num_entries,
    TOPK: tl.constexpr, MAX_LORAS: tl.constexpr, SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, COUNTED: tl.constexpr, HAS_LORA: tl.constexpr,
    HAS_MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program places one chunk of one slot's pairs. Its share of the table begins where the shares of the
    slots before it end, whose bounds follow from their sizes alone; so programs need nothing of each other
    but counts, which are made here from GROUP pairs at once: if COUNTED of the chunk's own group only, and
    those of whole groups are read, STEP at a time. A block's first pair writes the block's entry."""
    if not COUNTED:
        wait_for_former_kernel(PDL)
    number = tl.program_id(0)
    index = tl.arange(0, SLOTS)
    pairs = _slot_sizes(slot_rows, num_pairs, TOPK, MAX_LORAS, SLOTS, HAS_LORA)
    place, within, size, before = _chunk(pairs, number, CHUNK, SLOTS)
    shares = tl.minimum(pairs, NUM_EXPERTS + pairs // BLOCK)
    share, end = tl.sum(tl.where(index < place, shares, 0), 0), tl.sum(shares, 0)
    own, pair, expert = _experts(
        topk_ids, order, expert_map, within * CHUNK, size, before, known, TOPK, NUM_EXPERTS, CHUNK, HAS_LORA,
        HAS_MAP,
    )  # fmt: skip
    earlier = tl.zeros([EXPERTS], dtype=tl.int32)
    total = tl.zeros([EXPERTS], dtype=tl.int32)
    if COUNTED:
        group = within * CHUNK // GROUP
        j, _pair, theirs = _experts(
            topk_ids, order, expert_map, group * GROUP, size, before, known, TOPK, NUM_EXPERTS, GROUP,
            HAS_LORA, HAS_MAP,
        )  # fmt: skip
        earlier += tl.histogram(theirs, EXPERTS, (theirs >= 0) & (j < within * CHUNK))
        groups = tl.cdiv(pairs, GROUP)
        own_groups, groups_before = tl.cdiv(size, GROUP), tl.sum(tl.where(index < place, groups, 0), 0)
        wait_for_former_kernel(PDL)
        for step in range(0, own_groups, STEP):
            i = step + tl.arange(0, STEP)
            rows = counts + (groups_before + i)[:, None] * EXPERTS + tl.arange(0, EXPERTS)[None, :]
            # .cg: past the first-level cache, which does not see the other kernel's stores.
            tile = tl.load(rows, mask=(i < own_groups)[:, None], other=0, cache_modifier=".cg")
            total += tl.sum(tile, 0)
            earlier += tl.sum(tl.where((i < group)[:, None], tile, 0), 0)
    else:
        for first in range(0, size, GROUP):
            j, _pair, theirs = _experts(
                topk_ids, order, expert_map, first, size, before, known, TOPK, NUM_EXPERTS, GROUP, HAS_LORA,
                HAS_MAP,
            )  # fmt: skip
            total += tl.histogram(theirs, EXPERTS, theirs >= 0)
            earlier += tl.histogram(theirs, EXPERTS, (theirs >= 0) & (j < within * CHUNK))
    let_next_kernel_start(PDL)

    used = tl.cdiv(total, BLOCK)
    first_block = share + tl.cumsum(used, 0) - used
    first_place = before + tl.cumsum(total, 0) - total
    same = (expert[:, None] == expert[None, :]) & (own[None, :] < own[:, None])
    valid = expert >= 0
    of = tl.maximum(expert, 0)
    rank = tl.sum(same.to(tl.int32), 1) + tl.gather(earlier, of, 0)
    block = tl.gather(first_block, of, 0) + rank // BLOCK
    left = tl.gather(total, of, 0) - rank
    at = tl.gather(first_place, of, 0) + rank
    if PADDED:
        at = block * BLOCK + rank % BLOCK
    tl.store(sorted_ids + at, pair, mask=valid)
    slot = tl.cast(0, tl.int32)
    if HAS_LORA:
        slot = tl.load(lora_ids + place, mask=place < MAX_LORAS, other=-1)
    leads = valid & (rank % BLOCK == 0)
    tl.store(blocks + block * 4, slot + tl.zeros([CHUNK], dtype=tl.int32), mask=leads)
    tl.store(blocks + block * 4 + 1, expert, mask=leads)
    tl.store(blocks + block * 4 + 2, at, mask=leads)
    tl.store(blocks + block * 4 + 3, tl.minimum(left, BLOCK), mask=leads)
    if (within == 0) & (size > 0):
        _set_idle(blocks, share + tl.sum(used, 0), share + _of(shares, index, place))
    each = tl.cdiv(num_entries - end, tl.num_programs(0))
    _set_idle(blocks, end + number * each, tl.minimum(end + (number + 1) * each, num_entries))


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

    The arguments and errors are those of kernels/reference/moe_lora_align.py. The table has room for every
    routing of any step that was prepared with the plan of this one.
    """
    check_rows(topk_ids, "topk_ids", meta)
    slots = num_slots(meta)
    tables = meta.token_indices_sorted_by_lora_ids, meta.num_tokens_per_lora, meta.lora_ids
    request = _Request(
        topk_ids,
        num_experts,
        block_size,
        expert_map,
        pad_sorted_ids,
        slots,
        meta.max_loras,
        meta.plan.block_rank,
    )
    return _align(request, meta.token_lora_mapping, tables, meta.launches)


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    *,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
) -> MoEBlocks:
    """The same for the base model: every row is of slot 0."""
    request = _Request(topk_ids, num_experts, block_size, expert_map, pad_sorted_ids, 1, 1)
    return _align(request, None, None, {})


def num_slots(meta: LoRAKernelMeta) -> int:
    """Most slots that a step under the meta's plan can have: an item is of one slot."""
    return min(meta.max_loras, meta.plan.items)


def listed_slots(slots: int, max_loras: int) -> int:
    """How many entries of the list of active slots a kernel reads for a step of at most `slots`: a power of
    2, of which there are few different ones, as it is compiled in."""
    return min(_power_of_2(max_loras), max(_LEAST_SLOTS, _power_of_2(slots)))


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Request:
    topk_ids: Tensor
    num_experts: int
    block_size: int
    expert_map: Tensor | None
    padded: bool
    slots: int
    max_loras: int
    block_rank: int = 16

    @property
    def entries(self) -> int:
        """Entries that the table needs, whatever the routing: each slot's share is bounded by its pairs."""
        pairs = self.topk_ids.numel()
        return min(pairs, self.slots * self.num_experts + pairs // self.block_size)


def _align(
    request: _Request,
    row_slots: Tensor | None,
    tables: tuple[Tensor, Tensor, Tensor] | None,
    launches: dict[Hashable, Any],
) -> MoEBlocks:
    topk_ids, num_experts, block_size = request.topk_ids, request.num_experts, request.block_size
    check_choices(topk_ids, num_experts, request.expert_map)
    check(block_size > 0, "block_size", "must be at least 1")
    device, entries, pairs = topk_ids.device, request.entries, topk_ids.numel()
    blocks = torch.empty((entries, 4), dtype=torch.int32, device=device)
    if request.padded:
        sorted_ids = torch.full((entries * block_size,), pairs, dtype=torch.int32, device=device)
    else:
        sorted_ids = torch.empty(pairs, dtype=torch.int32, device=device)
    out = MoEBlocks(
        topk_ids, row_slots, num_experts, request.expert_map, block_size, sorted_ids, blocks,
        request.max_loras, block_rank=request.block_rank, launches=launches,
    )  # fmt: skip
    if entries > 0:
        _launch(request, out, tables)
    return out


def _launch(request: _Request, out: MoEBlocks, tables: tuple[Tensor, Tensor, Tensor] | None) -> None:
    topk_ids, pairs, expert_map = request.topk_ids, request.topk_ids.numel(), request.expert_map
    order, slot_rows, lora_ids = (topk_ids,) * 3 if tables is None else tables
    known = request.num_experts if expert_map is None else len(expert_map)
    experts = triton.next_power_of_2(request.num_experts)
    padded_pairs = triton.next_power_of_2(pairs)
    counted = pairs > _UNCOUNTED_PAIRS
    chunk = max(16, min(_MOST_PAIRS, padded_pairs))
    chunks = min(pairs, -(-pairs // chunk) + request.slots)
    group = _GROUP_PAIRS if counted else max(16, padded_pairs)
    pdl = has_dependent_launch(topk_ids.device)
    common = {
        "TOPK": topk_ids.shape[1], "MAX_LORAS": request.max_loras,
        "SLOTS": listed_slots(request.slots, request.max_loras), "NUM_EXPERTS": request.num_experts,
        "EXPERTS": experts, "GROUP": group, "HAS_LORA": tables is not None,
        "HAS_MAP": expert_map is not None, "PDL": pdl,
    }  # fmt: skip
    mapping = topk_ids if expert_map is None else expert_map
    constants = {
        **common, "CHUNK": chunk, "STEP": max(1, min(64, _COUNTS // experts)), "BLOCK": request.block_size,
        "PADDED": request.padded, "COUNTED": counted,
    }  # fmt: skip
    key = ("align", tuple(constants.items()), row_signature(topk_ids), row_signature(mapping))
    kernels = out.launches.get(key)
    if kernels is None:
        options = {"num_warps": 8, "launch_pdl": pdl}
        kernels = Launch(count_kernel, common, options), Launch(align_kernel, constants, options)
        out.launches[key] = kernels
    counts = topk_ids
    if counted:
        groups = -(-pairs // group) + request.slots
        counts = torch.empty((groups, experts), dtype=torch.int32, device=topk_ids.device)
        kernels[0]((groups,), counts, topk_ids, order, slot_rows, mapping, pairs, known)
    kernels[1](
        (chunks,), out.sorted_ids, out.blocks, counts, topk_ids, order, slot_rows, lora_ids, mapping, pairs,
        known, len(out.blocks),
    )  # fmt: skip
