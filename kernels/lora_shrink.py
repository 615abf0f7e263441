"""Shrink on the GPU: rows into their adapter's rank space.

The truth is kernels/reference/lora_shrink.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_hidden_block, check_launchable, check_rows, check_shrink
from kernels.launching.launch import Launch, row_signature, signature
from kernels.launching.tuning import ShrinkConfig, shrink_config
from kernels.metadata.launch_plan import PARTS, ROWS_PER_TILE
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.block_tile import columns_of, places_from, rows_by, valid_by, zeros_of
from kernels.tiles.device import (
    has_dependent_launch,
    let_next_kernel_start,
    load_item,
    load_rows,
    wait_for_former_kernel,
)


@triton.jit
def _rank_share(part, rank, PARTS: tl.constexpr, BLOCK_RANK: tl.constexpr):
    """[first, last) of the ranks that an entry computes: all, or its part of them in whole blocks."""
    first = 0
    last = rank
    if PARTS > 1:
        share = tl.cdiv(tl.cdiv(rank, PARTS), BLOCK_RANK) * BLOCK_RANK
        first = tl.where(part < 0, 0, part * share)
        last = tl.where(part < 0, rank, tl.minimum(first + share, rank))
    return first, last


@triton.jit
def _load_x(x_rows, k, count, K: tl.constexpr, ROWS: tl.constexpr):
    return tl.load(columns_of(x_rows, k, ROWS), mask=valid_by(count, k < K, ROWS), other=0.0)


@triton.jit
def _load_a(a_rows, valid, k, K: tl.constexpr):
    return tl.load(a_rows[:, None] + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _add_product(acc, x, a, ROWS: tl.constexpr):
    """acc += x @ a.T; acc is [columns] for one-row items, else [ROWS, columns]."""
    if ROWS == 1:
        return acc + tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    else:
        return tl.dot(x, tl.trans(a), acc, input_precision="ieee")


@triton.jit
def _add_steps(
    acc, x_rows, a_rows, valid, split, count,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    for step in range(FIRST, tl.cdiv(K, BLOCK_K * SPLIT)):
        k = (step * SPLIT + split) * BLOCK_K + tl.arange(0, BLOCK_K)
        acc = _add_product(acc, _load_x(x_rows, k, count, K, ROWS), _load_a(a_rows, valid, k, K), ROWS)
    return acc


@triton.jit
def _places(s, start, r, num_rows, MAX_RANK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets into [slices, num_rows, MAX_RANK]: [columns] for one-row items, else [ROWS, columns]."""
    return rows_by(places_from(start, ROWS), s.to(tl.int64) * num_rows * MAX_RANK + r, MAX_RANK, ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    h, partials, x, a, ranks, scales, work, order, finished,
    num_rows, x_stride, slot_stride, rank_stride, offset1, offset2,
    K: tl.constexpr, SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr, FUSED: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, FINALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, group, entry): one entry's rows times the ranks of FUSED slices, over its share of K.

    Columns are (slice, rank) pairs. The partial sums go to h[split] when expand adds them up; with FINALISE
    to `partials`, and the entry's last program adds them in the order of the splits: equal bits every time.
    """
    let_next_kernel_start(PDL)
    split, group, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, start, count, part = load_item(work, entry, num_rows, MAX_LORAS)
    column = tl.arange(0, FUSED * BLOCK_RANK)
    s = group if FUSED == 1 else column // BLOCK_RANK
    rank = tl.load(ranks + s * MAX_LORAS + slot, mask=s < tl.where(count > 0, SLICES, 0), other=0)
    rank = tl.minimum(rank, MAX_RANK)
    highest = rank if FUSED == 1 else tl.max(rank, 0)
    first, last = _rank_share(part, highest, PARTS, BLOCK_RANK)
    if first >= last:
        wait_for_former_kernel(PDL)
        return

    r = first + column % BLOCK_RANK
    # A product, not a choice of pointers: that way the compiler still knows that all are aligned.
    a += slot.to(tl.int64) * slot_stride + (s == 1).to(tl.int64) * offset1 + (s == 2).to(tl.int64) * offset2
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_tile = _load_a(a + r * rank_stride, r < rank, k, K)
    rows = load_rows(order, start, count, ROWS)
    scale = tl.load(scales + s * MAX_LORAS + slot, mask=s < SLICES, other=0.0)
    wait_for_former_kernel(PDL)

    x_rows = x + rows * x_stride
    acc = zeros_of(ROWS, FUSED * BLOCK_RANK)
    acc = _add_product(acc, _load_x(x_rows, k, count, K, ROWS), a_tile, ROWS)
    acc = _add_steps(acc, x_rows, a + r * rank_stride, r < rank, split, count, K, ROWS, BLOCK_K, SPLIT, 1)
    out = h + split.to(tl.int64) * SLICES * num_rows * MAX_RANK
    if FINALISE:
        out = partials + split.to(tl.int64) * SLICES * num_rows * MAX_RANK
    factor = 1.0 if FINALISE else scale
    valid = valid_by(count, (r < rank) & (r < last), ROWS)
    tl.store(out + _places(s, start, r, num_rows, MAX_RANK, ROWS), acc * factor, mask=valid)
    for block in range(first + BLOCK_RANK, last, BLOCK_RANK):
        r = block + column % BLOCK_RANK
        acc = zeros_of(ROWS, FUSED * BLOCK_RANK)
        acc = _add_steps(acc, x_rows, a + r * rank_stride, r < rank, split, count, K, ROWS, BLOCK_K, SPLIT, 0)
        valid = valid_by(count, (r < rank) & (r < last), ROWS)
        tl.store(out + _places(s, start, r, num_rows, MAX_RANK, ROWS), acc * factor, mask=valid)
    if FINALISE:
        counter = finished + entry * tl.num_programs(1) + group
        tl.debug_barrier()  # all of this program's partials are stored before it counts itself
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(counter, 0)
            for block in range(first, last, BLOCK_RANK):
                r = block + column % BLOCK_RANK
                valid = valid_by(count, (r < rank) & (r < last), ROWS)
                places = _places(s, start, r, num_rows, MAX_RANK, ROWS)
                total = zeros_of(ROWS, FUSED * BLOCK_RANK)
                for i in tl.static_range(SPLIT):
                    offset = places + tl.cast(i * SLICES, tl.int64) * num_rows * MAX_RANK
                    # .cg: past the first-level cache, which does not see other programs' stores.
                    total += tl.load(partials + offset, mask=valid, other=0.0, cache_modifier=".cg")
                tl.store(h + places, total * scale, mask=valid)


def lora_shrink(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    meta: LoRAKernelMeta,
    config: ShrinkConfig | None = None,
) -> None:
    """Semantics: h[s, p, :r] = scales[s, slot] * (x[row(p)] @ lora_a[s][slot, :r].T), r = ranks[s, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    h       float32 [slices, rows, max_rank], overwritten; stays undefined at columns >= r and base places.
            Or [splits, slices, rows, max_rank]: h.sum(0) is the result, for a lora_expand that adds them up
    x       [rows, in], of lora_a's dtype, contiguous rows
    lora_a  up to 3 slices of [max_loras, max_rank, in], strided views of one arena; a row >= r is never read
    ranks   int32 [slices, max_loras], contiguous; 0: the slot has no such module
    scales  float32 [slices, max_loras], contiguous
    config  block sizes; h's splits must be its splits. None: the tuned ones for this step

    On sm_90 weights, ranks, scales and metadata are read while the kernel before may still run
    (`let_next_kernel_start` says who must not write them).
    Sums are float32; repeated launches give equal bits. Raises KernelArgumentError.
    """
    check(len(lora_a) > 0, "lora_a", "holds no slice")
    config = config or shrink_config(
        meta.plan, len(lora_a), x.shape[-1], x.element_size(), final=h.dim() == 3
    )
    launch = shrink_launch(h, x, lora_a, ranks, scales, meta, config)
    check_rows(x, "x", meta)
    check_hidden_block(h, lora_a[0], len(lora_a), meta)
    _check_config(config, h, meta)
    launch(h, x, lora_a[0], ranks, scales, meta)


@dataclass(frozen=True, slots=True)
class ShrinkLaunch:
    """A checked launch: what stays the same while x, lora_a and the tables keep their form."""

    kernel: Launch
    config: ShrinkConfig
    slices: int
    strides: tuple[int, ...]  # of x's rows, lora_a's slots and rows; offsets of the second and third slice

    def __call__(
        self, h: Tensor, x: Tensor, first_a: Tensor, ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
    ) -> None:
        """h and x must fit the step and the config: nothing is checked here."""
        grid, lists = self.grid(meta), self._lists(meta)
        if grid[2] == 0:
            return
        self.kernel(
            grid, h, self.partials(h), x, first_a, ranks, scales, *lists, meta.num_rows, *self.strides
        )

    def bound(
        self, first_a: Tensor, ranks: Tensor, scales: Tensor, meta: LoRAKernelMeta
    ) -> Callable[..., None] | None:
        """Launch.bound for every plan of this config; takes the plan's grid, h, partials and x."""
        return self.kernel.bound((first_a, ranks, scales, *self._lists(meta)), self.strides)

    def partials(self, h: Tensor) -> Tensor:
        """Memory for the splits where the kernel adds them up, else h."""
        if self.config.final and self.config.split > 1:
            return torch.empty((self.config.split, *h.shape), dtype=h.dtype, device=h.device)
        return h

    def grid(self, meta: LoRAKernelMeta) -> tuple[int, int, int]:
        """The grid of the step's plan, which the config must be for."""
        if self.config.rows == ROWS_PER_TILE:
            return self.config.split, 1, meta.plan.tiles
        return self.config.split, self.slices, meta.plan.items

    def _lists(self, meta: LoRAKernelMeta) -> tuple[Tensor, Tensor, Tensor]:
        work = meta.tiles if self.config.fused else meta.items
        return work, meta.token_indices_sorted_by_lora_ids, meta.finished_splits


def shrink_launch(
    h: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    ranks: Tensor,
    scales: Tensor,
    meta: LoRAKernelMeta,
    config: ShrinkConfig,
) -> ShrinkLaunch:
    """Checked and made when tensors of this form come for the first time; later only looked up."""
    offsets = (_offset(lora_a, 1), _offset(lora_a, 2))
    tensors = (row_signature(x), signature(*lora_a, ranks, scales))
    key = ("shrink", config, meta.plan.parts, offsets, tensors)
    launch: ShrinkLaunch | None = meta.launches.get(key)
    if launch is None:
        check_shrink(h, x, lora_a, ranks, scales, meta)
        check_launchable("lora_a", lora_a, x=x, ranks=ranks, scales=scales)
        check(x.dtype == lora_a[0].dtype, "x", f"is {x.dtype}, lora_a {lora_a[0].dtype}")
        strides = (x.stride(0), lora_a[0].stride(0), lora_a[0].stride(1), *offsets)
        launch = ShrinkLaunch(_launch(config, x, lora_a, meta), config, len(lora_a), strides)
        meta.launches[key] = launch
    return launch


def _launch(config: ShrinkConfig, x: Tensor, lora_a: Sequence[Tensor], meta: LoRAKernelMeta) -> Launch:
    pdl = has_dependent_launch(x.device)
    constants = {
        "K": x.shape[1], "SLICES": len(lora_a), "MAX_LORAS": meta.max_loras, "MAX_RANK": lora_a[0].shape[1],
        "PARTS": PARTS if meta.plan.parts else 1,
        "FUSED": triton.next_power_of_2(len(lora_a)) if config.fused else 1, "ROWS": config.rows,
        "BLOCK_RANK": config.block_rank, "BLOCK_K": config.block_k, "SPLIT": config.split,
        "FINALISE": config.final and config.split > 1, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    return Launch(shrink_kernel, constants, options)


def _check_config(config: ShrinkConfig, h: Tensor, meta: LoRAKernelMeta) -> None:
    tiled = config.fused and meta.plan.tiles
    rows = ROWS_PER_TILE if tiled else meta.plan.rows_per_item
    check(config.rows == rows, "config", f"is for entries of {config.rows} rows, the step's have {rows}")
    splits = 1 if config.final else config.split
    given = h.shape[0] if h.dim() == 4 else 1
    check(given == splits, "h", f"holds {given} splits, the config makes {splits}")


def _offset(stack: Sequence[Tensor], index: int) -> int:
    """Elements from the first slice to another: slices are views of one arena, or at least of one memory."""
    if index >= len(stack):
        return 0
    return (stack[index].data_ptr() - stack[0].data_ptr()) // stack[0].element_size()
