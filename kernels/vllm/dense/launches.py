"""Starts the reference API's dense kernels on tensors that fit: nothing is checked here. Needs triton."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

import torch
import triton
from torch import Tensor

from kernels.launching.launch import Launch
from kernels.metadata.launch_plan import MAX_SLICES
from kernels.tiles.device import has_dependent_launch
from kernels.vllm.dense.delta_kernel import add_delta_kernel
from kernels.vllm.dense.expand_kernel import expand_members_kernel, expand_tiles_kernel
from kernels.vllm.dense.product_kernel import product_kernel
from kernels.vllm.dense.shrink_kernel import shrink_members_kernel, shrink_tiles_kernel
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.tuning import (
    ExpandConfig,
    ProductConfig,
    ShrinkConfig,
    expand_config,
    shrink_config,
)

# More than a model's forms of layers times the sizes of its steps.
_MOST_LAUNCHES = 4096
_DELTA_COLUMNS = 1024


def shrink(output: Tensor, x: Tensor, lora_a: Sequence[Tensor], step: Step, scale: float) -> None:
    """output [slices, rows, rank]: all of it is written, with zeros for rows without an adapter."""
    for first in range(0, len(lora_a), MAX_SLICES):
        some = lora_a[first : first + MAX_SLICES]
        config = shrink_config(x.shape[0], x.shape[1], len(some), some[0].shape[-2], x.element_size())
        into = output[first : first + MAX_SLICES]
        with whole(into, config.split) as h:
            launch_shrink(h, x, some, step, scale, config)


@contextmanager
def whole(into: Tensor, splits: int) -> Iterator[Tensor]:
    """Zeros [splits, *into] for the parts of shrink, whose sum is then `into`."""
    if splits == 1:
        yield into.zero_()[None]
        return
    h = torch.zeros((splits, *into.shape), dtype=torch.float32, device=into.device)
    yield h
    torch.sum(h, 0, dtype=into.dtype, out=into)


def expand(
    output: Tensor, h: Tensor, lora_b: Sequence[Tensor], step: Step, offset: int, *, add_inputs: bool
) -> None:
    """h [slices, rows, rank]; the slices' columns follow each other from `offset` on."""
    for first in range(0, len(lora_b), MAX_SLICES):
        some = lora_b[first : first + MAX_SLICES]
        columns = sum(weight.shape[-2] for weight in some)
        config = expand_config(output.shape[0], columns, some[0].shape[-1], add_inputs=add_inputs)
        part = h[None, first : first + MAX_SLICES]
        launch_expand(output, part, some, offset, step, config, add_inputs=add_inputs)
        offset += columns


def add_pair(
    y: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    step: Step,
    scale: float,
    *,
    add_inputs: bool,
    work: Tensor | None = None,
    fill: bool = False,
) -> None:
    """Both, without zeros for base rows between them, and with the splits' sum left to expand.

    `work` is of `kernels.vllm.dense.work`; without it programs find out whose rows they have. `fill` writes
    zeros into the slices' columns of rows without an adapter, in steps of more than MOST_SINGLE_ROWS.
    """
    offset, rows = 0, x.shape[0]
    for first in range(0, len(lora_a), MAX_SLICES):
        some_a, some_b = lora_a[first : first + MAX_SLICES], lora_b[first : first + MAX_SLICES]
        columns, rank = sum(weight.shape[-2] for weight in some_b), some_a[0].shape[-2]
        config = shrink_config(rows, x.shape[1], len(some_a), rank, x.element_size())
        h = torch.empty((config.split, len(some_a), rows, rank), dtype=torch.float32, device=x.device)
        launch_shrink(h, x, some_a, step, scale, config, work)
        then = expand_config(rows, columns, rank, add_inputs=add_inputs)
        launch_expand(y, h, some_b, offset, step, then, work, add_inputs=add_inputs, fill=fill)
        offset += columns


def product_with_pair(
    y: Tensor, x: Tensor, weight: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], step: Step,
    work: Tensor | None, config: ProductConfig,
) -> None:  # fmt: skip
    """y = x @ weight.T and the pair, of up to three slices that have all columns of y: shrink, then a product
    that runs beside it, then expand, which sums the product's splits.

    `step.token_lora_mapping` is -1 in rows behind the step's.
    """
    (rows, width), rank = y.shape, lora_a[0].shape[-2]
    of_shrink = shrink_config(rows, x.shape[1], len(lora_a), rank, x.element_size())
    h = torch.empty((of_shrink.split, len(lora_a), rows, rank), dtype=torch.float32, device=x.device)
    parts = None
    if config.split > 1:
        parts = torch.empty((config.split, rows, width), dtype=torch.float32, device=x.device)
    launch_shrink(h, x, lora_a, step, 1.0, of_shrink, work, early=False)
    _launch_product(y if parts is None else parts, x, weight, config)
    of_expand = expand_config(rows, width, rank)
    launch_expand(y, h, lora_b, 0, step, of_expand, work, add_inputs=True, parts=parts)


def _launch_product(out: Tensor, x: Tensor, weight: Tensor, config: ProductConfig) -> None:
    """out: [splits, rows, columns], contiguous."""
    strides = (x.stride(0), weight.stride(0))
    launch = _product_launch(
        config, weight.shape[0], weight.shape[1], x.device, (*form_of(out, x, weight), *int_form(*strides))
    )
    launch((weight.shape[0] // config.block_n, config.split), out, x, weight, x.shape[0], *strides)


@lru_cache(maxsize=_MOST_LAUNCHES)
def _product_launch(
    config: ProductConfig, width: int, inputs: int, device: torch.device, specialised: tuple[object, ...]
) -> Launch:
    pdl = has_dependent_launch(device)
    constants = {
        "WIDTH": width, "SHARE": inputs // config.split, "ROWS": config.rows, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "STAGES": config.num_stages, "SWAPPED": config.swapped, "PDL": pdl,
    }  # fmt: skip
    return Launch(product_kernel, constants, {"num_warps": config.num_warps, "launch_pdl": pdl})


def add_delta(y: Tensor, delta: Tensor, step: Step, max_loras: int) -> None:
    """y [rows, columns] += delta, in rows that have an adapter; both rounded to y's type."""
    rows, columns = y.shape
    launch = _delta_launch(columns, max_loras, y.device, form_of(y, delta, step.token_lora_mapping))
    launch((-(-columns // _DELTA_COLUMNS), rows), y, delta, step.token_lora_mapping)


@lru_cache(maxsize=_MOST_LAUNCHES)
def _delta_launch(
    columns: int, max_loras: int, device: torch.device, specialised: tuple[object, ...]
) -> Launch:
    pdl = has_dependent_launch(device)
    constants = {"WIDTH": columns, "MAX_LORAS": max_loras, "COLUMNS": _DELTA_COLUMNS, "PDL": pdl}
    return Launch(add_delta_kernel, constants, {"num_warps": 4, "launch_pdl": pdl})


@lru_cache(maxsize=_MOST_LAUNCHES)
def _shrink_launch(
    config: ShrinkConfig, width: int, slices: int, max_loras: int,
    num_ids: int, max_rank: int, told: int, early: bool, device: torch.device,
    specialised: tuple[object, ...],
) -> Launch:  # fmt: skip
    """`specialised`: what else Triton compiles for."""
    pdl = has_dependent_launch(device)
    constants: dict[str, object] = {
        "K": width, "SLICES": slices, "MAX_LORAS": max_loras, "NUM_IDS": num_ids,
        "LANES": triton.next_power_of_2(num_ids), "MAX_RANK": max_rank, "ROWS": config.rows,
        "BLOCK_RANK": config.block_rank, "BLOCK_K": config.block_k, "SPLIT": config.split,
        "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    if config.rows_a_slot:
        constants |= {"ALONE_K": config.alone_k, "ROWS_A_SLOT": config.rows_a_slot, "TOLD": told}
        constants["EARLY"] = early
        return Launch(shrink_members_kernel, constants, options)
    constants["FUSED"] = triton.next_power_of_2(slices) if config.fused else 1
    return Launch(shrink_tiles_kernel, constants, options)


@lru_cache(maxsize=_MOST_LAUNCHES)
def _expand_launch(
    config: ExpandConfig, splits: int, add_inputs: bool, parts: int, fill: bool, offset: int,
    widths: tuple[int, ...], max_loras: int, num_ids: int, max_rank: int, told: int, aligned: bool,
    device: torch.device, specialised: tuple[object, ...],
) -> Launch:  # fmt: skip
    pdl = has_dependent_launch(device)
    constants: dict[str, object] = {
        **columns_of(widths, offset), "SLICES": len(widths), "MAX_LORAS": max_loras, "NUM_IDS": num_ids,
        "LANES": triton.next_power_of_2(num_ids), "MAX_RANK": max_rank, "SPLIT": splits,
        "ROWS": config.rows, "BLOCK_RANK": config.block_rank, "BLOCK_N": config.block_n,
        "COLUMNS": config.columns, "ADD_INPUTS": add_inputs, "ALIGNED": aligned, "PDL": pdl,
    }  # fmt: skip
    options = {"num_warps": config.num_warps, "num_stages": 1, "launch_pdl": pdl}
    if config.rows_a_slot:
        constants |= {
            "ALONE_N": config.alone_n, "ROWS_A_SLOT": config.rows_a_slot, "TOLD": told,
            "SKIP_ZEROS": config.skip_zeros and not parts, "PARTS": parts, "ALL": sum(widths),
        }  # fmt: skip
        return Launch(expand_members_kernel, constants, options)
    return Launch(expand_tiles_kernel, constants | {"FILL": fill}, options)


def form_of(*tensors: Tensor) -> tuple[object, ...]:
    """What Triton compiles for, of tensors."""
    return tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors)


def int_form(*values: int) -> tuple[object, ...]:
    """And of numbers."""
    return tuple((value == 1, value % 16 == 0, -(2**31) <= value < 2**31) for value in values)


def three(stack: Sequence[Tensor]) -> list[Tensor]:
    """A tensor for each slice that a kernel can have; those of none are not read."""
    return [stack[min(s, len(stack) - 1)] for s in range(MAX_SLICES)]


def are_aligned(stack: Sequence[Tensor]) -> bool:
    """Whether each slot of each slice starts at a multiple of 16 bytes."""
    return all(w.data_ptr() % 16 == 0 and w.stride(0) * w.element_size() % 16 == 0 for w in stack)


def columns_of(widths: Sequence[int], offset: int) -> dict[str, object]:
    """A kernel's constants of slices whose columns follow each other from `offset` on."""
    missing = (0,) * (MAX_SLICES - len(widths))
    starts = accumulate(widths[:-1], initial=offset)
    return {
        **{f"WIDTH{s}": width for s, width in enumerate((*widths, *missing))},
        **{f"START{s}": start for s, start in enumerate((*starts, *missing))},
    }


def launch_shrink(
    h: Tensor, x: Tensor, lora_a: Sequence[Tensor], step: Step, scale: float, config: ShrinkConfig,
    work: Tensor | None = None, *, early: bool = True,
) -> None:  # fmt: skip
    """h: float32 [splits, slices, rows, rank], or any floating type where there is one split. Up to three
    slices. `early`: see the kernel."""
    first = lora_a[0]
    size = first.element_size()
    offsets = [
        (lora_a[s].data_ptr() - first.data_ptr()) // size if s < len(lora_a) else 0
        for s in range(1, MAX_SLICES)
    ]
    strides = (x.stride(0), first.stride(0), first.stride(-2), *offsets)
    rows, rank = x.shape[0], first.shape[-2]
    told, table = _told(work, step, config)
    launch = _shrink_launch(
        config, x.shape[1], len(lora_a), first.shape[0], step.num_ids, rank, told, early, x.device,
        (*form_of(h, x, first), *int_form(*strides)),
    )  # fmt: skip
    columns = -(-rank // config.block_rank) * (1 if config.fused else len(lora_a))
    members = rows if config.rows_a_slot else -(-rows // config.rows)
    grid = (config.split, columns, members)
    launch(grid, h, x, first, *step.groups, *table, scale, rows, *strides)


def launch_expand(
    y: Tensor, h: Tensor, lora_b: Sequence[Tensor], offset: int, step: Step, config: ExpandConfig,
    work: Tensor | None = None, *, add_inputs: bool, fill: bool = False, parts: Tensor | None = None,
) -> None:  # fmt: skip
    """h: [splits, slices, rows, rank]. Up to three slices, whose columns start at `offset`. `fill`: see
    `add_pair`; `parts`: float32 [splits, rows, columns], whose sum stands for what is in y, in small steps.
    """
    slices, widths = three(lora_b), tuple(weight.shape[-2] for weight in lora_b)
    strides = (y.stride(0), *(weight.stride(0) for weight in slices), lora_b[0].stride(-2))
    told, table = _told(work, step, config)
    if config.rows_a_slot:
        table = (*table, step.token_lora_mapping, y if parts is None else parts)
    num_parts = 0 if parts is None else parts.shape[0]
    launch = _expand_launch(
        config, h.shape[0], add_inputs, num_parts, fill, offset, widths, lora_b[0].shape[0], step.num_ids,
        lora_b[0].shape[-1], told, are_aligned(lora_b), y.device,
        (*form_of(y, h, *slices), *int_form(*strides)),
    )  # fmt: skip
    column_tiles, rows = sum(-(-width // config.columns) for width in widths), y.shape[0]
    members = rows if config.rows_a_slot else -(-rows // config.rows)
    launch((column_tiles, members), y, h, *slices, *step.groups, *table, rows, *strides)


def _told(
    work: Tensor | None, step: Step, config: ShrinkConfig | ExpandConfig
) -> tuple[int, tuple[Tensor, ...]]:
    """How many entries kernels for small steps are told, and what they have as `work`: not read where they
    are told none. Others have no such argument."""
    if not config.rows_a_slot:
        return 0, ()
    return (0, (step.lora_ids,)) if work is None else (work.shape[1], (work,))
