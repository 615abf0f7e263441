"""Per-expert LoRA on the GPU. The truth is kernels/reference/fused_moe_lora.py."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.fused_moe_lora_once import fused_moe_lora_once_kernel
from kernels.launching.block_launch import (
    BlockWork,
    check_arena,
    column_tiles,
    columns_side_by_side,
    offsets,
    slices_of,
    strides_of,
    widths_and_starts,
)
from kernels.launching.checks import check
from kernels.launching.fp8 import check_card, is_fp8
from kernels.launching.launch import Launch, row_signature, signature
from kernels.launching.moe_blocks import MoEBlocks, check_choices, check_fused_moe_lora
from kernels.launching.moe_tuning import MOST_ONCE_RANKS, OnceConfig, PairConfig, block_size, choose
from kernels.metadata.meta import LoRAKernelMeta
from kernels.moe_lora_align import moe_lora_align_block_size, num_slots
from kernels.tiles.block_expand import block_expand_kernel
from kernels.tiles.block_shrink import block_shrink_kernel
from kernels.tiles.device import has_dependent_launch


def moe_blocks(
    topk_ids: Tensor, num_experts: int, meta: LoRAKernelMeta, *, expert_map: Tensor | None = None
) -> MoEBlocks:
    """The step's expert choices as suits the kernels: aligned, or, where most are alone, one block each."""
    size = block_size(meta, topk_ids.shape[-1], num_experts)
    if size == 1 and num_slots(meta) > 0:
        return unaligned_blocks(topk_ids, num_experts, meta, expert_map=expert_map)
    return moe_lora_align_block_size(topk_ids, num_experts, size, meta, expert_map=expert_map)


def unaligned_blocks(
    topk_ids: Tensor, num_experts: int, meta: LoRAKernelMeta, *, expert_map: Tensor | None = None
) -> MoEBlocks:
    """Every choice as a block of its own: no launch, but weights that choices share are read for each."""
    check_choices(topk_ids, num_experts, expert_map)
    return MoEBlocks(
        topk_ids, meta.token_lora_mapping, num_experts, expert_map, 1, topk_ids, topk_ids, meta.max_loras,
        aligned=False, block_rank=meta.plan.block_rank, launches=meta.launches,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Layer:
    """The arguments of one call."""

    y: Tensor
    x: Tensor
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]
    ranks: Tensor
    scales: Tensor
    column_starts: Sequence[int]
    routed: Tensor | None
    add_inputs: bool

    @property
    def max_rank(self) -> int:
        return self.lora_a[0].shape[2]

    def form(self) -> Hashable:
        """What checks and compiled kernels depend on."""
        weights = signature(*self.lora_a, *self.lora_b, self.ranks, self.scales)
        routed = None if self.routed is None else row_signature(self.routed)
        rows = row_signature(self.x), row_signature(self.y), routed
        return weights, rows, tuple(self.column_starts), self.add_inputs, offsets(self.lora_a)


def fused_moe_lora(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    column_starts: Sequence[int],
    blocks: MoEBlocks,
    *,
    routed_weights: Tensor | None = None,
    add_inputs: bool = True,
    config: PairConfig | OnceConfig | None = None,
) -> None:
    """Semantics: y[p, start_s:start_s + out_s] += w[p] * (scale * x[row(p)] @ A_s[slot, e].T) @ B_s[slot, e].

    The arguments are those of kernels/reference/fused_moe_lora.py; besides, a stack's slices have one slot
    stride, x and y contiguous rows, and lora_a is FP8 or of x's type. FP8 weights are taken as they are:
    whoever fills a slot puts their scales into `scales`.
    config  form and block sizes. None: the tuned ones. One launch serves up to 64 rank rows a slot

    Sums are float32; h is rounded to y's type where blocks have several rows; y is rounded once. Repeated
    launches give equal bits. Raises KernelArgumentError; also for e4m3 below sm_89.
    """
    layer = _Layer(y, x, lora_a, lora_b, ranks, scales, column_starts, routed_weights, add_inputs)
    work = BlockWork.of_choices(blocks)
    config = config or _chosen(layer, work, blocks.block_rank)
    pair_rows = x.shape[0] == blocks.num_pairs
    expert_map = None if blocks.expert_map is None else row_signature(blocks.expert_map)
    choices = row_signature(blocks.topk_ids), expert_map, blocks.num_experts, pair_rows
    key = ("fused_moe_lora", config, work.rows, work.kind, choices, layer.form())
    prepared: _Prepared | None = blocks.launches.get(key)
    if prepared is None or x.shape[0] not in (len(blocks.topk_ids), blocks.num_pairs):
        check_fused_moe_lora(
            y, x, tuple(lora_a), tuple(lora_b), ranks, scales, tuple(column_starts), blocks, routed_weights
        )
        _check(layer)
        prepared = _prepare(layer, work, config, 1 if pair_rows else blocks.topk)
        blocks.launches[key] = prepared
    check(y.shape[0] == blocks.num_pairs, "y", f"must have {blocks.num_pairs} rows, one a pair")
    if work.entries > 0:
        prepared(layer, work)


def _chosen(layer: _Layer, work: BlockWork, block_rank: int) -> PairConfig | OnceConfig:
    fits = len(layer.lora_a) > 0 and layer.lora_a[0].dim() == 4
    check(fits, "lora_a", "must hold slices [max_loras, experts, max_rank, in]")
    block_rank = min(block_rank, triton.next_power_of_2(max(8, layer.max_rank)))
    x, slices = layer.x, len(layer.lora_a)
    return choose(work.rows, work.entries, slices, x.shape[-1], layer.max_rank, block_rank, x.element_size())


def _check(layer: _Layer) -> None:
    for argument, stack in (("lora_a", layer.lora_a), ("lora_b", layer.lora_b)):
        check_arena(stack, argument)
        check_card(stack[0], argument)
    for argument, tensor in (("x", layer.x), ("y", layer.y)):
        check(tensor.stride(1) == 1, argument, f"must have contiguous rows, has strides {tensor.stride()}")
    a = layer.lora_a[0]
    check(is_fp8(a) or layer.x.dtype == a.dtype, "x", f"is {layer.x.dtype}, lora_a {a.dtype}")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Checked launches, one or two, with the arguments that stay the same."""

    config: PairConfig | OnceConfig
    launches: tuple[Launch, ...]
    strides: tuple[tuple[int, ...], ...]
    tiles: int

    def __call__(self, layer: _Layer, work: BlockWork) -> None:
        routed = layer.ranks if layer.routed is None else layer.routed
        slices, b = len(layer.lora_a), slices_of(layer.lora_b)
        if isinstance(self.config, OnceConfig):
            self.launches[0](
                (self.config.chunks, slices, work.entries), layer.y, layer.x, layer.lora_a[0], *b,
                layer.ranks, layer.scales, routed, *work.tensors, work.places, work.known, *self.strides[0],
            )  # fmt: skip
            return
        shape = (self.config.split, slices, work.places, layer.max_rank)
        h = torch.empty(shape, dtype=torch.float32, device=layer.x.device)
        groups, none = 1 if self.config.fused else slices, layer.scales
        self.launches[0](
            (self.config.split, groups, work.entries), h, none, h, layer.x, none, layer.lora_a[0], none,
            layer.ranks, layer.scales, *work.tensors, none, work.places, work.known, *self.strides[0],
        )  # fmt: skip
        self.launches[1](
            (self.tiles, work.entries), layer.y, h, none, *b, none, none, none, layer.ranks, routed,
            *work.tensors, work.places, work.known, *self.strides[1],
        )  # fmt: skip


def _prepare(layer: _Layer, work: BlockWork, config: PairConfig | OnceConfig, divide: int) -> _Prepared:
    pdl = has_dependent_launch(layer.x.device)
    common = {
        **work.constants, "SLICES": len(layer.lora_a), "MAX_RANK": layer.max_rank, "PDL": pdl,
    }  # fmt: skip
    ends = {
        **widths_and_starts(layer.lora_b, layer.column_starts), "ADD_INPUTS": layer.add_inputs,
        "ROUTED": layer.routed is not None,
    }  # fmt: skip
    inputs = {"K": layer.x.shape[1], "DIVIDE": divide}
    if isinstance(config, OnceConfig):
        check(layer.max_rank <= MOST_ONCE_RANKS, "config", f"serves slots of up to {MOST_ONCE_RANKS} ranks")
        return _prepare_once(layer, config, {**common, **ends, **inputs})
    return _prepare_pair(layer, config, {**common, **inputs}, {**common, **ends})


def _prepare_once(layer: _Layer, config: OnceConfig, constants: dict[str, object]) -> _Prepared:
    a, b = layer.lora_a, layer.lora_b
    lowest = 16 if constants["ROWS"] != 1 else 8
    constants |= {
        "BLOCK_RANK": max(lowest, triton.next_power_of_2(layer.max_rank)), "BLOCK_K": config.block_k,
        "BLOCK_N": config.block_n, "COLUMN_STAGES": config.column_stages,
    }  # fmt: skip
    options = {
        "num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": constants["PDL"],
    }  # fmt: skip
    strides = (
        layer.y.stride(0), layer.x.stride(0), *a[0].stride()[:3], *offsets(a), b[0].stride(0),
        *strides_of(b, 1), *strides_of(b, 2), *layer.ranks.stride(), *layer.scales.stride(),
    )  # fmt: skip
    return _Prepared(config, (Launch(fused_moe_lora_once_kernel, constants, options),), (strides,), 0)


def _prepare_pair(
    layer: _Layer, config: PairConfig, shrink: dict[str, object], expand: dict[str, object]
) -> _Prepared:
    a, b, slices = layer.lora_a, layer.lora_b, len(layer.lora_a)
    shrink |= {
        "SCALED": False, "K_SCALED": False, "X_SCALED": False, "GROUP_N": 1, "GROUP_K": 1, "LARGEST": 0.0,
        "FUSED": triton.next_power_of_2(slices) if config.fused else 1, "BLOCK_RANK": config.block_rank,
        "BLOCK_K": config.block_k, "SPLIT": config.split, "FINALISE": False, "EARLY": False,
    }  # fmt: skip
    of_fp8 = columns_side_by_side(expand["ROWS"] == 1, config.block_n, config.expand_warps)
    vector = of_fp8 if is_fp8(b[0]) else 16
    expand |= {
        "SCALED": False, "K_SCALED": False, "GROUP_N": 1, "GROUP_K": 1, "W8A8": False, "SPLIT": config.split,
        "BLOCK_RANK": config.block_rank, "BLOCK_N": config.block_n, "VECTOR": vector, "EARLY": True,
    }  # fmt: skip
    shrink_strides = (
        layer.x.stride(0), *a[0].stride()[:3], *offsets(a), *layer.ranks.stride(), *layer.scales.stride(),
        0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    expand_strides = (
        layer.y.stride(0), b[0].stride(0), *strides_of(b, 1), *strides_of(b, 2), *layer.ranks.stride(),
        0, 0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    pdl = shrink["PDL"]
    launches = (
        Launch(
            block_shrink_kernel,
            shrink,
            {"num_warps": config.shrink_warps, "num_stages": config.shrink_stages, "launch_pdl": pdl},
        ),
        Launch(
            block_expand_kernel,
            expand,
            {"num_warps": config.expand_warps, "num_stages": 1, "launch_pdl": pdl},
        ),
    )
    return _Prepared(config, launches, (shrink_strides, expand_strides), column_tiles(b, config.block_n))
