"""Expand with FP8 weights: from rank space back into the output columns of each slice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.checks import check, check_rows, check_same_device, check_stack, check_table
from kernels.launching.fp8 import RANKS_PER_SCALE, check_hidden_fp8, check_weight_scales, is_fp8, spread
from kernels.metadata.meta import LoRAKernelMeta


def lora_expand_fp8(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    ranks: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    *,
    group_n: int = 0,
    group_k: int = 0,
    h_scales: Tensor | None = None,
    add_inputs: bool = True,
) -> None:
    """Semantics: y[row(p), start_s:start_s + out_s] += h[s, p, :r] @ (b_scales * lora_b)[s][slot, :r].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[s, slot].

    y         floating [rows, columns], changed in place; base rows and other columns are untouched
    h         float32 [slices, rows, max_rank], or FP8 as lora_b with h_scales (FP8 x FP8): lora_shrink_fp8's
    lora_b    FP8 rank-major slices [max_loras, max_rank, out_s], views allowed; a row >= r is never read
    b_scales  float32, a slice each: [max_loras, groups of group_k ranks, groups of group_n columns]
    ranks     int32 [slices, max_loras]; 0: the slot has no such module
    column_starts  first column of each slice in y
    group_n, group_k  0: all. So per tensor is (0, 0), per channel (1, 0), per block (128, 128)
    h_scales  float32 [slices, rows, groups of RANKS_PER_SCALE ranks]
    add_inputs  False overwrites an adapter row's slice instead of adding (with zeros where r is 0)

    The sum with y is formed in float32 and rounded once to y's dtype. Raises KernelArgumentError.
    """
    check_expand_fp8(y, h, lora_b, b_scales, ranks, column_starts, meta, (group_k, group_n), h_scales)
    if meta.no_lora_flag_cpu:
        return
    rank_table = ranks.tolist()
    for group in meta.groups:
        places = slice(group.start, group.start + group.count)
        for s, (weight, start) in enumerate(zip(lora_b, column_starts, strict=True)):
            rank = min(rank_table[s][group.slot], weight.shape[1])
            columns = slice(start, start + weight.shape[2])
            if not add_inputs:
                y[group.rows, columns] = 0
            if rank > 0:
                part = h[s, places, :rank].float()
                if h_scales is not None:
                    part = part * spread(h_scales[s, places], h.shape[1:], (1, RANKS_PER_SCALE))[:, :rank]
                factors = spread(b_scales[s][group.slot], weight.shape[1:], (group_k, group_n))[:rank]
                product = part @ (weight[group.slot, :rank].float() * factors)
                y[group.rows, columns] = (y[group.rows, columns] + product).to(y.dtype)


def check_expand_fp8(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    ranks: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    group: tuple[int, int],
    h_scales: Tensor | None,
) -> None:
    check_rows(y, "y", meta)
    check(y.dim() == 2 and y.is_floating_point(), "y", "must be a floating [rows, columns]")
    check(len(lora_b) > 0 and lora_b[0].dim() == 3, "lora_b", "must hold slices [max_loras, max_rank, out]")
    slices, max_rank = len(lora_b), lora_b[0].shape[1]
    check_stack(lora_b, "lora_b", max_rank, meta)
    check_weight_scales(b_scales, "b_scales", lora_b, "lora_b", group)
    check(
        len(column_starts) == slices, "column_starts", f"names {len(column_starts)} slices, lora_b {slices}"
    )
    for start, weight in zip(column_starts, lora_b, strict=True):
        ends = start + weight.shape[2]
        check(
            start >= 0 and ends <= y.shape[1],
            "column_starts",
            f"{start}..{ends} exceed y's {y.shape[1]} columns",
        )
    check_hidden_fp8(h, h_scales, slices, meta.num_rows, max_rank)
    check(not is_fp8(h) or h.dtype == lora_b[0].dtype, "h", f"is {h.dtype}, lora_b {lora_b[0].dtype}")
    check_table(ranks, "ranks", torch.int32, slices, meta)
    check_same_device(y.device, h=h, lora_b=lora_b[0], ranks=ranks)
