"""Expand: rank space back into the output columns of each slice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import check, check_hidden, check_rows, check_same_device, check_stack, check_table
from kernels.meta import LoRAKernelMeta


def lora_expand(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    *,
    add_inputs: bool = True,
) -> None:
    """Semantics: y[row(p), start_s:start_s + out_s] += h[s, p, :r] @ lora_b[s][slot, :r], r = ranks[s, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    y              floating [rows, columns], changed in place; base rows and other columns are untouched
    h              float32 [slices, rows, max_rank], from lora_shrink or lora_embedding
    lora_b         rank-major slices [max_loras, max_rank, out_s], views allowed; a row >= r is never read
    ranks          int32 [slices, max_loras]; 0: the slot has no such module
    column_starts  first column of each slice in y
    add_inputs     False overwrites an adapter row's slice instead of adding (with zeros where r is 0)

    The sum with y is formed in float32 and rounded once to y's dtype. Raises KernelArgumentError.
    """
    max_rank = _check(y, h, lora_b, ranks, column_starts, meta)
    if meta.no_lora_flag_cpu:
        return
    rank_table = ranks.tolist()
    for group in meta.groups:
        for s, (weight, start) in enumerate(zip(lora_b, column_starts, strict=True)):
            rank = min(rank_table[s][group.slot], max_rank)
            columns = slice(start, start + weight.shape[2])
            if not add_inputs:
                y[group.rows, columns] = 0
            if rank > 0:
                part = h[s, group.start : group.start + group.count, :rank]
                _add_product(y, group.rows, columns, part, weight[group.slot, :rank].float())


def _add_product(y: Tensor, rows: slice | Tensor, columns: slice, h: Tensor, weight: Tensor) -> None:
    if isinstance(rows, Tensor):
        y[rows, columns] = (y[rows, columns] + h @ weight).to(y.dtype)
    elif y.dtype == torch.float32:
        y[rows, columns].addmm_(h, weight)  # one pass over y instead of two
    else:
        y[rows, columns] += h @ weight


def _check(
    y: Tensor, h: Tensor, lora_b: Sequence[Tensor], ranks: Tensor, starts: Sequence[int], meta: LoRAKernelMeta
) -> int:
    check_rows(y, "y", meta)
    check(y.dim() == 2 and y.is_floating_point(), "y", "must be a floating [rows, columns]")
    check(len(lora_b) > 0 and lora_b[0].dim() == 3, "lora_b", "must hold slices [max_loras, max_rank, out]")
    max_rank = lora_b[0].shape[1]
    check_stack(lora_b, "lora_b", max_rank, meta)
    check(
        len(starts) == len(lora_b), "column_starts", f"names {len(starts)} slices, lora_b holds {len(lora_b)}"
    )
    for start, weight in zip(starts, lora_b, strict=True):
        ends = start + weight.shape[2]
        check(
            start >= 0 and ends <= y.shape[1],
            "column_starts",
            f"{start}..{ends} exceed y's {y.shape[1]} columns",
        )
    check_hidden(h, len(lora_b), max_rank, meta)
    check_table(ranks, "ranks", torch.int32, len(lora_b), meta)
    check_same_device(y.device, h=h, lora_b=lora_b[0], ranks=ranks)
    return max_rank
