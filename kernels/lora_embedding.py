"""Embedding's shrink on the GPU: a gather. The truth is kernels/reference/lora_embedding.py."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check_embedding, check_launchable
from kernels.launching.fp8 import check_card
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.device import (
    has_dependent_launch,
    let_next_kernel_start,
    load_item,
    wait_for_former_kernel,
)

# A gather of single elements: latency decides, tile sizes hardly matter.
_BLOCK_RANK = 16


@triton.jit(do_not_specialize=["num_rows", "vocab"])
def embedding_kernel(
    h, token_ids, a, ranks, scales, work, order, num_rows, vocab, slot_stride, rank_stride,
    MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of ranks, entry). Parts of a high-rank item: the first does it all."""
    let_next_kernel_start(PDL)
    block, entry = tl.program_id(0), tl.program_id(1)
    slot, start, count, part = load_item(work, entry, num_rows, MAX_LORAS)
    rank = tl.minimum(tl.load(ranks + slot, mask=count > 0, other=0), MAX_RANK)
    wait_for_former_kernel(PDL)
    if (part <= 0) & (block * BLOCK_RANK < rank):
        r = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
        scale = tl.load(scales + slot)
        place = tl.arange(0, ROWS)
        row = tl.load(order + start + place, mask=place < count, other=0).to(tl.int64)
        token = tl.load(token_ids + row, mask=place < count, other=-1).to(tl.int64)
        column = a + slot.to(tl.int64) * slot_stride + token[:, None]
        valid = (place < count)[:, None] & (r < rank)[None, :]
        known = valid & (token >= 0)[:, None] & (token < vocab)[:, None]
        values = tl.load(column + r[None, :].to(tl.int64) * rank_stride, mask=known, other=0.0)
        places = (start + place).to(tl.int64)[:, None] * MAX_RANK + r[None, :]
        tl.store(h + places, values.to(tl.float32) * scale, mask=valid)


def lora_embedding(
    h: Tensor, token_ids: Tensor, lora_a: Tensor, ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
) -> None:
    """Semantics: h[0, p, :r] = scales[0, slot] * lora_a[slot, :r, token_ids[row(p)]], r = ranks[0, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    h          float32 [1, rows, max_rank], written in place; stays undefined at columns >= r and base places
    token_ids  int32 or int64 [rows], contiguous; one outside [0, vocab) gives zeros
    lora_a     [max_loras, max_rank, vocab], a strided view is allowed; a row >= r is never read
    ranks      int32 [1, max_loras], contiguous; 0: the slot has no such module
    scales     float32 [1, max_loras], contiguous

    lora_expand or lora_expand_fp8 adds the result to the embedding's output. Raises KernelArgumentError; also
    for e4m3 below sm_89.
    """
    check_embedding(h, token_ids, lora_a, ranks, scales, meta)
    check_card(lora_a, "lora_a")
    check_launchable("lora_a", (lora_a,), h=h, token_ids=token_ids, ranks=ranks, scales=scales)
    if meta.plan.items == 0:
        return
    max_rank = lora_a.shape[1]
    pdl = has_dependent_launch(h.device)
    embedding_kernel[(triton.cdiv(max_rank, _BLOCK_RANK), meta.plan.items)](
        h=h, token_ids=token_ids, a=lora_a, ranks=ranks, scales=scales, work=meta.items,
        order=meta.token_indices_sorted_by_lora_ids, num_rows=meta.num_rows, vocab=lora_a.shape[2],
        slot_stride=lora_a.stride(0), rank_stride=lora_a.stride(1), MAX_LORAS=meta.max_loras,
        MAX_RANK=max_rank, ROWS=meta.plan.rows_per_item, BLOCK_RANK=_BLOCK_RANK, PDL=pdl, num_warps=2,
        launch_pdl=pdl,
    )  # fmt: skip
