"""Expand: from rank space back into the output columns of each slice."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kernels.launching.checks import check_expand
from kernels.metadata.meta import LoRAKernelMeta


def lora_expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    *,
    add_inputs: bool = True,
    output_scale: Tensor | None = None,
) -> None:
    """Semantics: y[row(p), start_s:start_s + out_s] += h[s, p, :r] @ lora_b[s][slot, :r], r = ranks[s, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    y              floating [rows, columns], changed in place; base rows and other columns are untouched
    h              float32 [slices, rows, max_rank], from lora_shrink or lora_embedding
    lora_b         rank-major slices [max_loras, max_rank, out_s], views allowed; a row >= r is never read
    ranks          int32 [slices, max_loras]; 0: the slot has no such module
    column_starts  first column of each slice in y
    add_inputs     False overwrites an adapter row's slice instead of adding (with zeros where r is 0)
    output_scale   float32 [max_loras, sum of out_s]: the sum is multiplied by it, where r is not 0

    The sum with y is formed in float32 and rounded once to y's dtype. Raises KernelArgumentError.
    """
    check_expand(y, h, lora_b, ranks, column_starts, meta, output_scale)
    columns_before = list(accumulate((weight.shape[2] for weight in lora_b), initial=0))
    if meta.no_lora_flag_cpu:
        return
    rank_table = ranks.tolist()
    for group in meta.groups:
        for s, (weight, start) in enumerate(zip(lora_b, column_starts, strict=True)):
            rank = min(rank_table[s][group.slot], weight.shape[1])
            columns = slice(start, start + weight.shape[2])
            if not add_inputs:
                y[group.rows, columns] = 0
            if rank > 0:
                part = h[s, group.start : group.start + group.count, :rank]
                product = part, weight[group.slot, :rank].float()
                if output_scale is None:
                    _add_product(y, group.rows, columns, *product)
                else:
                    factor = output_scale[group.slot, columns_before[s] : columns_before[s + 1]]
                    y[group.rows, columns] = ((y[group.rows, columns] + part @ product[1]) * factor).to(
                        y.dtype
                    )


def _add_product(y: Tensor, rows: slice | Tensor, columns: slice, h: Tensor, weight: Tensor) -> None:
    if isinstance(rows, Tensor):
        y[rows, columns] = (y[rows, columns] + h @ weight).to(y.dtype)
    elif y.dtype == torch.float32:
        y[rows, columns].addmm_(h, weight)  # one pass over y instead of two
    else:
        y[rows, columns] += h @ weight
