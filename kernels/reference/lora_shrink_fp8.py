"""Shrink with FP8 weights: rows into their adapter's rank space, in float32 or quantized again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launching.checks import check, check_rows, check_same_device, check_stack, check_table
from kernels.launching.fp8 import (
    RANKS_PER_SCALE,
    check_hidden_fp8,
    check_row_scales,
    check_weight_scales,
    is_fp8,
    quantized,
    spread,
)
from kernels.metadata.meta import LoRAKernelMeta


def lora_shrink_fp8(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    meta: LoRAKernelMeta,
    *,
    group_n: int = 0,
    group_k: int = 0,
    x_scales: Tensor | None = None,
    h_scales: Tensor | None = None,
) -> None:
    """Semantics: h[s, p, :r] = scales[s, slot] * (x[row(p)] @ (a_scales * lora_a)[s][slot, :r].T).

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot,
    r = ranks[s, slot].

    h         float32 [slices, rows, max_rank], or FP8 with h_scales; overwritten, stays undefined at columns
              >= r and base places
    x         [rows, in]: bfloat16, float16 or float32; or FP8 as lora_a, with x_scales (FP8 x FP8)
    lora_a    FP8 slices of [max_loras, max_rank, in], strided views allowed; a row >= r is never read
    a_scales  float32, a slice each: [max_loras, groups of group_n ranks, groups of group_k inputs]
    ranks     int32 [slices, max_loras]; 0: the slot has no such module
    scales    float32 [slices, max_loras]
    group_n, group_k  0: all. So per tensor is (0, 0), per channel (1, 0), per block (128, 128)
    x_scales  float32 [rows, 1], or [rows, groups of group_k inputs]
    h_scales  float32 [slices, rows, groups of RANKS_PER_SCALE ranks], overwritten: each row's own largest
              value becomes the largest of FP8

    Products are summed in float32. Raises KernelArgumentError.
    """
    check_shrink_fp8(h, x, lora_a, a_scales, ranks, scales, meta, (group_n, group_k), x_scales, h_scales)
    if meta.no_lora_flag_cpu:
        return
    rank_table, scale_table = ranks.tolist(), scales.tolist()
    whole = x.float()
    if x_scales is not None:
        columns = group_k if x_scales.shape[1] > 1 else 0
        whole = whole * spread(x_scales, x.shape, (1, columns))
    for group in meta.groups:
        for s, weight in enumerate(lora_a):
            rank = min(rank_table[s][group.slot], weight.shape[1])
            if rank > 0:
                factors = spread(a_scales[s][group.slot], weight.shape[1:], (group_n, group_k))[:rank]
                a = weight[group.slot, :rank].float() * factors
                product = whole[group.rows] @ a.T * scale_table[s][group.slot]
                places = slice(group.start, group.start + group.count)
                if h_scales is None:
                    h[s, places, :rank] = product
                else:
                    h[s, places, :rank], found = quantized(product, h.dtype, (1, RANKS_PER_SCALE))
                    h_scales[s, places, : found.shape[1]] = found


def check_shrink_fp8(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    meta: LoRAKernelMeta,
    group: tuple[int, int],
    x_scales: Tensor | None,
    h_scales: Tensor | None,
) -> None:
    check_rows(x, "x", meta)
    check(x.dim() == 2 and x.is_floating_point(), "x", "must be a floating [rows, in]")
    check(len(lora_a) > 0 and lora_a[0].dim() == 3, "lora_a", "must hold slices [max_loras, max_rank, in]")
    slices, max_rank = len(lora_a), lora_a[0].shape[1]
    check_stack(lora_a, "lora_a", max_rank, meta)
    for index, weight in enumerate(lora_a):
        check(
            weight.shape[2] == x.shape[1], f"lora_a[{index}]", f"has width {weight.shape[2]}, x {x.shape[1]}"
        )
    check_weight_scales(a_scales, "a_scales", lora_a, "lora_a", group)
    check(not is_fp8(x) or x.dtype == lora_a[0].dtype, "x", f"is {x.dtype}, lora_a {lora_a[0].dtype}")
    groups = 1 if x_scales is None or x_scales.shape[-1] == 1 else -(-x.shape[1] // (group[1] or x.shape[1]))
    check_row_scales(x_scales, "x_scales", x, "x", (x.shape[0], groups))
    check_hidden_fp8(h, h_scales, slices, meta.num_rows, max_rank)
    check_table(ranks, "ranks", torch.int32, slices, meta)
    check_table(scales, "scales", torch.float32, slices, meta)
    check_same_device(x.device, h=h, lora_a=lora_a[0], ranks=ranks, scales=scales)
