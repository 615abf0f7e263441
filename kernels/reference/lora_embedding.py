"""Embedding's shrink: an input row is one-hot, so A's column of that token is the product."""

import torch
from torch import Tensor

from kernels.launching.checks import check_embedding
from kernels.metadata.meta import LoRAKernelMeta


def lora_embedding(
    h: Tensor, token_ids: Tensor, lora_a: Tensor, ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
) -> None:
    """Semantics: h[0, p, :r] = scales[0, slot] * lora_a[slot, :r, token_ids[row(p)]], r = ranks[0, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    h          float32 [1, rows, max_rank], written in place; stays undefined at columns >= r and base places
    token_ids  int32 or int64 [rows], each in [0, vocab)
    lora_a     [max_loras, max_rank, vocab], a strided view is allowed; a row >= r is never read
    ranks      int32 [1, max_loras]; 0: the slot has no such module
    scales     float32 [1, max_loras]

    lora_expand adds the result to the embedding's output. Raises KernelArgumentError.
    """
    check_embedding(h, token_ids, lora_a, ranks, scales, meta)
    if meta.no_lora_flag_cpu:
        return
    rank_row, scale_row = ranks[0].tolist(), scales[0].tolist()
    for group in meta.groups:
        rank = min(rank_row[group.slot], lora_a.shape[1])
        if rank > 0:
            columns = lora_a[group.slot, :rank].index_select(1, token_ids[group.rows])
            out = h[0, group.start : group.start + group.count, :rank]
            torch.mul(columns.float().T, scale_row[group.slot], out=out)
