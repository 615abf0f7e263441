"""A step's expert choices, sorted by adapter and expert and cut into blocks of work."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.checks import check, check_same_device

# In a block table's entry: no work.
IDLE = -1


@dataclass(frozen=True, slots=True, eq=False)
class MoEBlocks:
    """Pair p = row * topk + k is a row's k-th expert choice. A block holds pairs of one slot and one expert.

    topk_ids     int32 or int64 [rows, topk]: global expert numbers
    row_slots    int32 [rows or more]: each row's slot, -1: none. None: all rows are of slot 0
    num_experts  experts whose weights are here
    expert_map   int32 [global experts]: the expert's place here, -1: elsewhere. None: all are here
    block_size   most pairs of a block
    sorted_ids   int32 [places]: pairs by slot, expert and number. A place outside all blocks holds anything,
                 or the number of pairs if they were padded
    blocks       int32 [n, 4]: slot, expert here, first place, pairs; slot -1: no block, anywhere in the table
    num_slots    slots that may occur
    aligned      False: there is no table, pair i is a block by itself (the GPU's form for small batches)
    block_rank   most adapters' ranks are at most this; steers speed only
    launches     what the launchers have compiled, by what it was compiled for

    On a GPU all of it is filled by the device, so that a captured graph replays with other choices.
    """

    topk_ids: Tensor
    row_slots: Tensor | None
    num_experts: int
    expert_map: Tensor | None
    block_size: int
    sorted_ids: Tensor
    blocks: Tensor
    num_slots: int
    aligned: bool = True
    block_rank: int = 16
    launches: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def topk(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def num_pairs(self) -> int:
        return self.topk_ids.numel()


def most_blocks(pairs: int, num_experts: int, block_size: int) -> int:
    """Blocks that the pairs of one slot can need, whatever their experts; a slot's share of the table."""
    return min(pairs, num_experts + pairs // block_size)


def check_choices(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> None:
    check(
        topk_ids.dim() == 2 and topk_ids.dtype in (torch.int32, torch.int64),
        "topk_ids",
        f"must be int32 or int64 [rows, topk], is {topk_ids.dtype} {list(topk_ids.shape)}",
    )
    check(topk_ids.is_contiguous(), "topk_ids", "must be contiguous")
    check(num_experts > 0, "num_experts", "must be at least 1")
    if expert_map is not None:
        fits = expert_map.dtype == torch.int32 and expert_map.dim() == 1 and expert_map.is_contiguous()
        check(fits, "expert_map", "must be contiguous int32 [global experts]")
        check_same_device(topk_ids.device, expert_map=expert_map)


def check_expert_stack(stack: tuple[Tensor, ...], argument: str, blocks: MoEBlocks) -> None:
    """Every slice is [max_loras, experts, max_rank, width], contiguous along the width."""
    check(len(stack) > 0, argument, "holds no slice")
    for index, weight in enumerate(stack):
        name = f"{argument}[{index}]"
        fits = weight.dim() == 4 and weight.shape[1] == blocks.num_experts
        if not fits or weight.shape[:3] != stack[0].shape[:3]:
            expected = f"[max_loras, {blocks.num_experts} experts, max_rank, width], alike in all slices"
            raise KernelArgumentError(name, f"must be {expected}, is {list(weight.shape)}")
        check(weight.shape[0] >= blocks.num_slots, name, f"has fewer than {blocks.num_slots} slots")
        check(weight.stride(3) == 1, name, "must have contiguous rows (stride 1 along the width)")


def check_expert_table(table: Tensor, argument: str, dtype: torch.dtype, like: Tensor, slices: int) -> None:
    expected = [slices, *like.shape[:2]]
    if list(table.shape) != expected or table.dtype != dtype:
        raise KernelArgumentError(
            argument,
            f"must be {dtype} {expected} [slices, max_loras, experts], is {table.dtype} {list(table.shape)}",
        )


def check_pair_rows(x: Tensor, argument: str, blocks: MoEBlocks) -> None:
    """x has a row a token, or one a pair."""
    rows = (blocks.topk_ids.shape[0], blocks.num_pairs)
    if x.dim() != 2 or x.shape[0] not in rows or not x.is_floating_point():
        raise KernelArgumentError(
            argument, f"must be floating [{rows[0]} rows or {rows[1]} pairs, width], is {list(x.shape)}"
        )


def check_fused_moe_lora(
    y: Tensor,
    x: Tensor,
    lora_a: tuple[Tensor, ...],
    lora_b: tuple[Tensor, ...],
    ranks: Tensor,
    scales: Tensor,
    column_starts: tuple[int, ...],
    blocks: MoEBlocks,
    routed_weights: Tensor | None,
) -> None:
    check_pair_rows(x, "x", blocks)
    check_expert_stack(lora_a, "lora_a", blocks)
    check_expert_stack(lora_b, "lora_b", blocks)
    slices = len(lora_a)
    check(len(lora_b) == slices, "lora_b", f"holds {len(lora_b)} slices, lora_a {slices}")
    check(
        lora_a[0].shape[:3] == lora_b[0].shape[:3], "lora_b", "has other slots, experts or ranks than lora_a"
    )
    for index, weight in enumerate(lora_a):
        if weight.shape[3] != x.shape[1]:
            raise KernelArgumentError(f"lora_a[{index}]", f"has width {weight.shape[3]}, x {x.shape[1]}")
    fits = y.dim() == 2 and y.shape[0] == blocks.num_pairs and y.is_floating_point()
    check(fits, "y", f"must be floating [{blocks.num_pairs} pairs, columns], is {list(y.shape)}")
    check(
        len(column_starts) == slices, "column_starts", f"names {len(column_starts)} slices, lora_b {slices}"
    )
    for start, weight in zip(column_starts, lora_b, strict=True):
        ends = start + weight.shape[3]
        if start < 0 or ends > y.shape[1]:
            raise KernelArgumentError("column_starts", f"{start}..{ends} exceed y's {y.shape[1]} columns")
    check_expert_table(ranks, "ranks", torch.int32, lora_a[0], slices)
    check_expert_table(scales, "scales", torch.float32, lora_a[0], slices)
    check_same_device(
        y.device,
        x=x,
        lora_a=lora_a[0],
        lora_b=lora_b[0],
        ranks=ranks,
        scales=scales,
        topk_ids=blocks.topk_ids,
    )
    if routed_weights is not None:
        check_routed_weights(routed_weights, blocks)


def check_routed_weights(routed_weights: Tensor, blocks: MoEBlocks) -> None:
    fits = routed_weights.shape == blocks.topk_ids.shape and routed_weights.is_floating_point()
    check(fits, "routed_weights", f"must be floating {list(blocks.topk_ids.shape)}")
    check(routed_weights.is_contiguous(), "routed_weights", "must be contiguous")
    check_same_device(blocks.topk_ids.device, routed_weights=routed_weights)


def check_moe_gemm(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    blocks: MoEBlocks,
    bias: Tensor | None,
    routed_weights: Tensor | None,
) -> None:
    check_pair_rows(x, "x", blocks)
    fits = weight.dim() == 3 and weight.shape[0] == blocks.num_experts and weight.shape[2] == x.shape[1]
    check(fits, "weight", f"must be [{blocks.num_experts}, out, {x.shape[1]}], is {list(weight.shape)}")
    expected = (blocks.num_pairs, weight.shape[1])
    check(tuple(y.shape) == expected, "y", f"must be {list(expected)}, is {list(y.shape)}")
    for argument, tensor in (("x", x), ("weight", weight)):
        check(tensor.dtype == y.dtype, argument, f"is {tensor.dtype}, y {y.dtype}")
    if bias is not None:
        fits = bias.shape == weight.shape[:2] and bias.dtype == y.dtype
        check(fits, "bias", f"must be {y.dtype} {list(weight.shape[:2])}")
        check_same_device(y.device, bias=bias)
    check_same_device(y.device, x=x, weight=weight, topk_ids=blocks.topk_ids)
    if routed_weights is not None:
        check_routed_weights(routed_weights, blocks)
