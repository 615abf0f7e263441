"""Expand on the GPU: from rank space back into output columns.

The truth is kernels/reference/lora_expand.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.launching.checks import check, check_expand, check_hidden_block, check_launchable, check_rows
from kernels.launching.launch import Launch, row_signature, signature
from kernels.launching.tuning import ExpandConfig, expand_config
from kernels.metadata.launch_plan import MAX_SLICES, PARTS, ROWS_PER_TILE
from kernels.metadata.meta import LoRAKernelMeta
from kernels.tiles.device import (
    has_dependent_launch,
    let_next_kernel_start,
    load_item,
    load_rows,
    of_slice,
    wait_for_former_kernel,
)
from kernels.tiles.expand_tile import delta, load_b, load_h

# A part's tile: 128 bytes of 2-byte columns, so whole cache lines, and ranks enough to need few turns.
_NARROW = 64
_PART_RANKS = 128


@triton.jit
def _expand_tile(
    y, h, b, output_scale, order, start, count, s, first, width, column_start, rank, num_rows,
    y_stride, b_stride,
    SLICES: tl.constexpr, SPLIT: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, ADD_INPUTS: tl.constexpr,
    HAS_OUTPUT_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns [first, first + BLOCK_N) of one slice for one item's rows. B is on its way before the wait."""
    n = first + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_RANK)
    b_tile = load_b(b, b_stride, r, n, rank, width)
    rows = load_rows(order, start, count, ROWS)
    # Rank 0 adds nothing and has no output scale: the product stays zero.
    scaled_width = tl.where(rank > 0, width, 0)
    wait_for_former_kernel(PDL)
    if ROWS == 1:
        places = y + rows * y_stride + column_start + n
        valid = n < width
        factors = output_scale + n
        scaled = n < scaled_width
    else:
        places = y + (rows * y_stride)[:, None] + (column_start + n)[None, :]
        valid = (tl.arange(0, ROWS) < count)[:, None] & (n < width)[None, :]
        factors = output_scale + n[None, :]
        scaled = (n < scaled_width)[None, :]
    h_tile = load_h(h, s, start, count, r, rank, num_rows, SLICES, SPLIT, MAX_RANK, ROWS)
    if ADD_INPUTS:
        before = tl.load(places, mask=valid, other=0.0)
    acc = delta(
        h_tile, b_tile, h, b, b_stride, s, start, count, n, rank, width, num_rows, SLICES, SPLIT, MAX_RANK,
        ROWS, BLOCK_RANK, BLOCK_N,
    )  # fmt: skip
    if ADD_INPUTS:
        acc += before.to(tl.float32)
    if HAS_OUTPUT_SCALE:
        acc *= tl.load(factors, mask=scaled, other=0.0)
    tl.store(places, acc.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    y, h, b0, b1, b2, ranks, output_scale, work, order,
    num_rows, y_stride, slot_stride, b_stride0, b_stride1, b_stride2, scale_stride,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    START0: tl.constexpr, START1: tl.constexpr, START2: tl.constexpr,
    SLICES: tl.constexpr, MAX_LORAS: tl.constexpr, MAX_RANK: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, NARROW: tl.constexpr, PART_RANKS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, ADD_INPUTS: tl.constexpr,
    HAS_OUTPUT_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (column tile, entry); the tiles of all slices follow each other.

    A part of a high-rank item takes NARROW of the tile's columns and PART_RANKS at once; spare parts idle.
    """
    let_next_kernel_start(PDL)
    tile, entry = tl.program_id(0), tl.program_id(1)
    slot, start, count, part = load_item(work, entry, num_rows, MAX_LORAS)
    TILES0: tl.constexpr = (WIDTH0 + BLOCK_N - 1) // BLOCK_N
    TILES1: tl.constexpr = TILES0 + (WIDTH1 + BLOCK_N - 1) // BLOCK_N
    s = (tile >= TILES0).to(tl.int32) + (tile >= TILES1).to(tl.int32)
    first = (tile - of_slice(s, 0, TILES0, TILES1, 3)) * BLOCK_N
    width = of_slice(s, WIDTH0, WIDTH1, WIDTH2, 3)
    rank = tl.load(ranks + s * MAX_LORAS + slot, mask=count > 0, other=0)
    rank = tl.minimum(rank, MAX_RANK)
    skip = (count == 0) | ((rank <= 0) & ADD_INPUTS)
    if PARTS > 1:
        skip = skip | (first + part * NARROW >= width) | (part * NARROW >= BLOCK_N)
    if skip:
        wait_for_former_kernel(PDL)
        return

    b = of_slice(s, b0, b1, b2, SLICES) + slot.to(tl.int64) * slot_stride
    b_stride = of_slice(s, b_stride0, b_stride1, b_stride2, SLICES)
    column_start = of_slice(s, START0, START1, START2, SLICES)
    factors = output_scale + slot.to(tl.int64) * scale_stride + of_slice(s, 0, WIDTH0, WIDTH0 + WIDTH1, 3)
    if PARTS > 1:
        if part >= 0:
            end = tl.minimum(first + (part + 1) * NARROW, width)
            _expand_tile(
                y, h, b, factors, order, start, count, s, first + part * NARROW, end, column_start, rank,
                num_rows, y_stride, b_stride, SLICES, SPLIT, MAX_RANK, ROWS, PART_RANKS, NARROW, ADD_INPUTS,
                HAS_OUTPUT_SCALE, PDL,
            )  # fmt: skip
            return
    _expand_tile(
        y, h, b, factors, order, start, count, s, first, width, column_start, rank, num_rows, y_stride,
        b_stride, SLICES, SPLIT, MAX_RANK, ROWS, BLOCK_RANK, BLOCK_N, ADD_INPUTS, HAS_OUTPUT_SCALE, PDL,
    )  # fmt: skip


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
    config: ExpandConfig | None = None,
) -> None:
    """Semantics: y[row(p), start_s:start_s + out_s] += h[s, p, :r] @ lora_b[s][slot, :r], r = ranks[s, slot].

    p is a place of the sorted order, row(p) = token_indices_sorted_by_lora_ids[p], slot that row's slot.

    y              floating [rows, columns], changed in place; base rows and other columns are untouched
    h              float32 [slices, rows, max_rank] or [splits, slices, rows, max_rank], whose sum counts
    lora_b         up to 3 rank-major slices [max_loras, max_rank, out_s] of one arena; a row >= r is never
                   read
    ranks          int32 [slices, max_loras], contiguous; 0: the slot has no such module
    column_starts  first column of each slice in y
    add_inputs     False overwrites an adapter row's slice instead of adding (with zeros where r is 0)
    output_scale   float32 [max_loras, sum of out_s]: the sum is multiplied by it, where r is not 0
    config         block sizes. None: the tuned ones for this step

    On sm_90 weights, ranks, scales and metadata are read while the kernel before may still run
    (`let_next_kernel_start` says who must not write them).
    One-row items use h in float32, others in lora_b's dtype; sums are float32, rounded once to y's dtype.
    Raises KernelArgumentError.
    """
    check(len(lora_b) > 0, "lora_b", "holds no slice")
    config = config or expand_config(meta.plan, lora_b[0].element_size())
    launch = expand_launch(
        y, h, lora_b, ranks, column_starts, meta, config, add_inputs=add_inputs, output_scale=output_scale
    )
    check_rows(y, "y", meta)
    check_hidden_block(h, lora_b[0], len(lora_b), meta)
    launch(y, h, lora_b, ranks, ranks if output_scale is None else output_scale, meta)


@dataclass(frozen=True, slots=True)
class ExpandLaunch:
    """A checked launch: what stays the same while y, lora_b and the tables keep their form."""

    kernel: Launch
    config: ExpandConfig
    tiles: int
    strides: tuple[int, ...]  # of y's rows, lora_b's slots, its three slices' rows, output_scale's slots

    def __call__(
        self,
        y: Tensor,
        h: Tensor,
        lora_b: Sequence[Tensor],
        ranks: Tensor,
        output_scale: Tensor,
        meta: LoRAKernelMeta,
    ) -> None:
        """y and h must fit the step and the config: nothing but the config's rows is checked here."""
        work, entries = _work(self.config, meta)
        if entries == 0:
            return
        kept = _kept(lora_b, ranks, output_scale, work, meta)
        self.kernel((self.tiles, entries), y, h, *kept, meta.num_rows, *self.strides)

    def bound(
        self, lora_b: Sequence[Tensor], ranks: Tensor, output_scale: Tensor, meta: LoRAKernelMeta
    ) -> Callable[..., None] | None:
        """Launch.bound for every plan of this config; takes the plan's grid, y and h."""
        work, _ = _work(self.config, meta)
        return self.kernel.bound(_kept(lora_b, ranks, output_scale, work, meta), self.strides)

    def grid(self, meta: LoRAKernelMeta) -> tuple[int, int, int]:
        """The grid of the step's plan, which the config must be for."""
        tiled = self.config.rows == ROWS_PER_TILE
        return self.tiles, meta.plan.tiles if tiled else meta.plan.items, 1


def expand_launch(
    y: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    ranks: Tensor,
    column_starts: Sequence[int],
    meta: LoRAKernelMeta,
    config: ExpandConfig,
    *,
    add_inputs: bool = True,
    output_scale: Tensor | None = None,
) -> ExpandLaunch:
    """Checked and made when tensors of this form come for the first time; later only looked up."""
    splits = h.shape[0] if h.dim() == 4 else 1
    tables = (ranks,) if output_scale is None else (ranks, output_scale)
    form = (config, splits, meta.plan.parts, add_inputs, tuple(column_starts))
    key = ("expand", form, row_signature(y), signature(*lora_b, *tables))
    launch: ExpandLaunch | None = meta.launches.get(key)
    if launch is None:
        check_expand(y, h, lora_b, ranks, column_starts, meta, output_scale)
        check_launchable("lora_b", lora_b, y=y, ranks=ranks)
        kernel = _launch(config, splits, add_inputs, column_starts, lora_b, meta, *tables)
        row_strides = [lora_b[min(s, len(lora_b) - 1)].stride(1) for s in range(MAX_SLICES)]
        scale_stride = 0 if output_scale is None else output_scale.stride(0)
        strides = (y.stride(0), lora_b[0].stride(0), *row_strides, scale_stride)
        tiles = sum(-(-weight.shape[2] // config.block_n) for weight in lora_b)
        launch = meta.launches[key] = ExpandLaunch(kernel, config, tiles, strides)
    return launch


def _kept(
    lora_b: Sequence[Tensor], ranks: Tensor, output_scale: Tensor, work: Tensor, meta: LoRAKernelMeta
) -> tuple[Tensor, ...]:
    """The kernel's tensors from b0 to order."""
    slices = lora_b[0], lora_b[min(1, len(lora_b) - 1)], lora_b[-1]
    return (*slices, ranks, output_scale, work, meta.token_indices_sorted_by_lora_ids)


def _work(config: ExpandConfig, meta: LoRAKernelMeta) -> tuple[Tensor, int]:
    """The list whose entries have the config's rows, and how many programs walk it."""
    if config.rows == ROWS_PER_TILE and meta.plan.tiles:
        return meta.tiles, meta.plan.tiles
    rows = meta.plan.rows_per_item
    check(config.rows == rows, "config", f"is for entries of {config.rows} rows, the step's have {rows}")
    return meta.items, meta.plan.items


def _launch(
    config: ExpandConfig,
    splits: int,
    add_inputs: bool,
    column_starts: Sequence[int],
    lora_b: Sequence[Tensor],
    meta: LoRAKernelMeta,
    ranks: Tensor,
    output_scale: Tensor | None = None,
) -> Launch:
    missing = [0] * (MAX_SLICES - len(lora_b))
    widths, starts = [weight.shape[2] for weight in lora_b] + missing, [*column_starts, *missing]
    pdl = has_dependent_launch(ranks.device)
    constants = {
        **{f"WIDTH{s}": width for s, width in enumerate(widths)},
        **{f"START{s}": start for s, start in enumerate(starts)},
        "SLICES": len(lora_b), "MAX_LORAS": meta.max_loras, "MAX_RANK": lora_b[0].shape[1], "SPLIT": splits,
        "PARTS": PARTS if meta.plan.parts else 1, "NARROW": min(_NARROW, config.block_n),
        "PART_RANKS": _PART_RANKS, "ROWS": config.rows, "BLOCK_RANK": config.block_rank,
        "BLOCK_N": config.block_n, "ADD_INPUTS": add_inputs, "HAS_OUTPUT_SCALE": output_scale is not None,
        "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    return Launch(expand_kernel, constants, options)
