"""Shrink: rows into their adapter's rank space."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.checks import check_shrink
from kernels.metadata.meta import LoRAKernelMeta


def lora_shrink(
    h: Tensor, x: Tensor, lora_a: Sequence[Tensor], ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
) -> None:
    """Semantics: h[s, p, :r] = scales[s, slot] * (x[row(p)] @ lora_a[s][slot, :r].T), r = ranks[s, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    h       float32 [slices, rows, max_rank], overwritten; stays undefined at columns >= r and base places
    x       floating [rows, in]
    lora_a  slices of [max_loras, max_rank, in], strided views allowed; a row >= r is never read
    ranks   int32 [slices, max_loras]; 0: the slot has no such module
    scales  float32 [slices, max_loras]

    Products are summed in float32 and the scale applied to the float32 sum. Raises KernelArgumentError.
    """
    check_shrink(h, x, lora_a, ranks, scales, meta)
    if meta.no_lora_flag_cpu:
        return
    rank_table, scale_table = ranks.tolist(), scales.tolist()
    for group in meta.groups:
        rows = x[group.rows].float()
        for s, weight in enumerate(lora_a):
            rank = min(rank_table[s][group.slot], weight.shape[1])
            if rank > 0:
                out = h[s, group.start : group.start + group.count, :rank]
                torch.mul(rows @ weight[group.slot, :rank].float().T, scale_table[s][group.slot], out=out)
