"""Per-expert LoRA from vLLM's tensors alone, in one launch or in two. It needs triton."""

import triton
import triton.language as tl

from kernels.tiles.block_tile import begin, rows_by, times_columns, times_rows, wait_if_early
from kernels.tiles.device import of_slice
from kernels.vllm.experts.tile import (
    add_columns,
    expanded,
    load_b,
    load_block,
    shrunk,
    times_routed,
    valid_columns,
)

# Numbers that change with the step: compiled kernels do not depend on them.
_STEP = ["lists", "num_pairs", "num_places", "num_blocks", "h_slice"]


@triton.jit
def _weights(first, second, third, s, slot, expert, slot_stride, expert_stride, SLICES: tl.constexpr):
    """The s-th of three stacks, at one slot and expert."""
    of = of_slice(s, first, second, third, SLICES)
    return of + slot.to(tl.int64) * slot_stride + expert.to(tl.int64) * expert_stride


@triton.jit(do_not_specialize=_STEP)
def moe_shrink_kernel(
    h, x, a0, a1, a2, x_scales, a_scales0, a_scales1, a_scales2, expert_ids, sorted_ids, post_pad, lora_ids,
    adapter_enabled, row_slots, lists, num_pairs, num_places, num_blocks, h_slice, x_stride, a_slot_stride,
    a_expert_stride, a_stride, x_scale_stride, x_scale_k, a_scale_slot, a_scale_expert, a_scale_n, a_scale_k,
    K: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, DIVIDE: tl.constexpr, LISTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, SORTED: tl.constexpr, SCALED: tl.constexpr, K_SCALED: tl.constexpr,
    X_SCALED: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile of ranks, split, slice) of each block; h is [split, slices, rows, RANK].

    h's rows are the pairs; SORTED: the places of all slots. h_slice: elements of one slice of h. DIVIDE:
    pairs that share a row of x.
    """
    begin(PDL, False)
    TILES: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    program = tl.program_id(0)
    tile, split = program % TILES, program // TILES % SPLIT
    s, index = program // (TILES * SPLIT) % SLICES, program // (TILES * SPLIT * SLICES)
    slot, expert, place, pairs, there, some = load_block(
        index, expert_ids, sorted_ids, post_pad, lora_ids, adapter_enabled, row_slots, lists, num_pairs,
        num_places, num_blocks, MAX_LORAS, NUM_EXPERTS, TOPK, LISTS, BLOCK, ROWS,
    )  # fmt: skip
    if not some:
        return
    r = tile * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    a = _weights(a0, a1, a2, s, slot, expert, a_slot_stride, a_expert_stride, SLICES)
    factors = _weights(a_scales0, a_scales1, a_scales2, s, slot, expert, a_scale_slot, a_scale_expert, SLICES)
    rows = pairs // DIVIDE
    total = shrunk(
        x + rows * x_stride, there, a, r, a_stride, x_scales + rows * x_scale_stride, x_scale_k,
        factors + tl.minimum(r, RANK - 1) // GROUP_N * a_scale_n, a_scale_k, split, K, RANK, ROWS, BLOCK_RANK,
        BLOCK_K, SPLIT, SCALED, K_SCALED, X_SCALED, GROUP_K,
    )  # fmt: skip
    if SORTED:
        pairs = slot.to(tl.int64) * num_places + place
        if ROWS > 1:
            pairs += tl.arange(0, ROWS)
    out = h + (split * SLICES + s).to(tl.int64) * h_slice
    tl.store(
        out + rows_by(pairs, r, RANK, ROWS), total.to(h.dtype.element_ty),
        mask=valid_columns(there, r < RANK, ROWS),
    )  # fmt: skip


@triton.jit
def _load_h(h, rows, r, valid, split_stride, RANK: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """The sum of shrink's splits, in their order: [ranks] for one row, else [ROWS, ranks]."""
    at = h + rows_by(rows, r, RANK, ROWS)
    total = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(at + i * split_stride, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=_STEP)
def moe_expand_kernel(
    y, h, b0, b1, b2, routed, h_scales, b_scales0, b_scales1, b_scales2, expert_ids, sorted_ids, post_pad,
    lora_ids, adapter_enabled, row_slots, lists, num_pairs, num_places, num_blocks, h_slice, y_stride, start,
    b_slot_stride, b_expert_stride, b_stride, h_scale_stride, h_scale_k, b_scale_slot, b_scale_expert,
    b_scale_n, b_scale_k,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, LISTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SORTED: tl.constexpr, SCALED: tl.constexpr, K_SCALED: tl.constexpr, X_SCALED: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, ADD_INPUTS: tl.constexpr, ROUTED: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (column tile, slice) of each block; slice s has the columns from start + s * WIDTH on."""
    begin(PDL, EARLY)
    TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile, s, index = program % TILES, program // TILES % SLICES, program // (TILES * SLICES)
    slot, expert, place, pairs, there, some = load_block(
        index, expert_ids, sorted_ids, post_pad, lora_ids, adapter_enabled, row_slots, lists, num_pairs,
        num_places, num_blocks, MAX_LORAS, NUM_EXPERTS, TOPK, LISTS, BLOCK, ROWS,
    )  # fmt: skip
    if not some:
        wait_if_early(PDL, EARLY)
        return
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b = _weights(b0, b1, b2, s, slot, expert, b_slot_stride, b_expert_stride, SLICES)
    factors = _weights(b_scales0, b_scales1, b_scales2, s, slot, expert, b_scale_slot, b_scale_expert, SLICES)
    factors += tl.minimum(n, WIDTH - 1) // GROUP_N * b_scale_n
    # B's first tile is on its way while shrink still runs.
    b_tile = load_b(b, b_stride, tl.arange(0, BLOCK_RANK), n, RANK, WIDTH)
    wait_if_early(PDL, EARLY)
    rows = pairs
    if SORTED:
        rows = slot.to(tl.int64) * num_places + place
        if ROWS > 1:
            rows += tl.arange(0, ROWS)
    split_stride = tl.cast(SLICES, tl.int64) * h_slice
    of_slice_ = h + s.to(tl.int64) * h_slice
    row_scales = h_scales + pairs * h_scale_stride
    for block in tl.static_range(0, RANK, BLOCK_RANK):
        r = block + tl.arange(0, BLOCK_RANK)
        h_tile = _load_h(
            of_slice_, rows, r, valid_columns(there, r < RANK, ROWS), split_stride, RANK, ROWS, SPLIT
        )
        if block > 0:
            b_tile = load_b(b, b_stride, r, n, RANK, WIDTH)
        product = expanded(h_tile, b_tile, y, ROWS)
        if K_SCALED:
            product = times_columns(product, tl.load(factors + block // GROUP_K * b_scale_k), ROWS, False)
            if X_SCALED:
                product = times_rows(product, tl.load(row_scales + block // GROUP_K * h_scale_k), ROWS)
        if block == 0:
            delta = product
        else:
            delta += product
    if SCALED and not K_SCALED:
        delta = times_columns(delta, tl.load(factors), ROWS, False)
    if X_SCALED and not K_SCALED:
        delta = times_rows(delta, tl.load(row_scales), ROWS)
    if ROUTED:
        delta = times_routed(delta, routed, pairs, there, ROWS)
    add_columns(y, delta, pairs, there, start + s * WIDTH, n, y_stride, ROWS, WIDTH, ADD_INPUTS)


@triton.jit
def _once(
    program, y, x, a0, a1, a2, b0, b1, b2, routed, expert_ids, sorted_ids, post_pad, lora_ids,
    adapter_enabled, row_slots, lists, num_pairs, num_places, num_blocks, x_stride, y_stride, start,
    a_slot_stride, a_expert_stride, a_stride, b_slot_stride, b_expert_stride, b_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, DIVIDE: tl.constexpr, LISTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, COLUMN_STAGES: tl.constexpr, ADD_INPUTS: tl.constexpr,
    ROUTED: tl.constexpr,
):  # fmt: skip
    chunk, s, index = program % CHUNKS, program // CHUNKS % SLICES, program // (CHUNKS * SLICES)
    slot, expert, _place, pairs, there, some = load_block(
        index, expert_ids, sorted_ids, post_pad, lora_ids, adapter_enabled, row_slots, lists, num_pairs,
        num_places, num_blocks, MAX_LORAS, NUM_EXPERTS, TOPK, LISTS, BLOCK, ROWS,
    )  # fmt: skip
    if some:
        r = tl.arange(0, BLOCK_RANK)
        a = _weights(a0, a1, a2, s, slot, expert, a_slot_stride, a_expert_stride, SLICES)
        b = _weights(b0, b1, b2, s, slot, expert, b_slot_stride, b_expert_stride, SLICES)
        # B's first tile is on its way beside A.
        n = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        b_tile = load_b(b, b_stride, r, n, RANK, WIDTH)
        h = shrunk(
            x + pairs // DIVIDE * x_stride, there, a, r, a_stride, x, 0, x, 0, 0, K, RANK, ROWS, BLOCK_RANK,
            BLOCK_K, 1, False, False, False, K,
        )  # fmt: skip
        column = start + s * WIDTH
        delta = expanded(h, b_tile, y, ROWS)
        if ROUTED:
            delta = times_routed(delta, routed, pairs, there, ROWS)
        add_columns(y, delta, pairs, there, column, n, y_stride, ROWS, WIDTH, ADD_INPUTS)
        for first in tl.range((chunk + CHUNKS) * BLOCK_N, WIDTH, CHUNKS * BLOCK_N, num_stages=COLUMN_STAGES):
            n = first + tl.arange(0, BLOCK_N)
            delta = expanded(h, load_b(b, b_stride, r, n, RANK, WIDTH), y, ROWS)
            if ROUTED:
                delta = times_routed(delta, routed, pairs, there, ROWS)
            add_columns(y, delta, pairs, there, column, n, y_stride, ROWS, WIDTH, ADD_INPUTS)


@triton.jit(do_not_specialize=_STEP)
def moe_once_kernel(
    y, x, a0, a1, a2, b0, b1, b2, routed, expert_ids, sorted_ids, post_pad, lora_ids, adapter_enabled,
    row_slots, lists, num_pairs, num_places, num_blocks, x_stride, y_stride, start, a_slot_stride,
    a_expert_stride, a_stride, b_slot_stride, b_expert_stride, b_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr, DIVIDE: tl.constexpr, LISTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, COLUMN_STAGES: tl.constexpr, ADD_INPUTS: tl.constexpr,
    ROUTED: tl.constexpr, PERSISTENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, slice) of each block: it shrinks its rows and expands every CHUNKS-th column tile.

    BLOCK_RANK holds every rank. PERSISTENT, where a block is a pair: a program takes the places of every
    num_programs-th of these.
    """
    begin(PDL, False)
    program = tl.program_id(0)
    if PERSISTENT:
        for turn in range(tl.cdiv(CHUNKS * SLICES * num_pairs - program, tl.num_programs(0))):
            _once(
                program + turn * tl.num_programs(0), y, x, a0, a1, a2, b0, b1, b2, routed, expert_ids,
                sorted_ids, post_pad, lora_ids, adapter_enabled, row_slots, lists, num_pairs, num_places,
                num_blocks, x_stride, y_stride, start, a_slot_stride, a_expert_stride, a_stride,
                b_slot_stride, b_expert_stride, b_stride, K, WIDTH, RANK, SLICES, MAX_LORAS, NUM_EXPERTS,
                TOPK, DIVIDE, LISTS, BLOCK, ROWS, BLOCK_RANK, BLOCK_K, BLOCK_N, CHUNKS, COLUMN_STAGES,
                ADD_INPUTS, ROUTED,
            )  # fmt: skip
    else:
        _once(
            program, y, x, a0, a1, a2, b0, b1, b2, routed, expert_ids, sorted_ids, post_pad, lora_ids,
            adapter_enabled, row_slots, lists, num_pairs, num_places, num_blocks, x_stride, y_stride, start,
            a_slot_stride, a_expert_stride, a_stride, b_slot_stride, b_expert_stride, b_stride, K, WIDTH,
            RANK, SLICES, MAX_LORAS, NUM_EXPERTS, TOPK, DIVIDE, LISTS, BLOCK, ROWS, BLOCK_RANK, BLOCK_K,
            BLOCK_N, CHUNKS, COLUMN_STAGES, ADD_INPUTS, ROUTED,
        )  # fmt: skip
