"""Starts the dense kernels with FP8 weights on tensors that are checked already. Needs triton."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import triton
from torch import Tensor

from kernels.launching.launch import Launch
from kernels.metadata.launch_plan import MAX_SLICES
from kernels.vllm.dense.fp8_kernel import expand_fp8_kernel, shrink_fp8_kernel
from kernels.vllm.dense.launches import are_aligned, columns_of, form_of, int_form, three, whole
from kernels.vllm.dense.step import Step
from kernels.vllm.dense.tuning import block_rank_of
from kernels.vllm.scaling import Scaling

# More than a model's forms of layers times the sizes of its steps.
_MOST_LAUNCHES = 4096
# Steps with more rows go by tiles of the sorted order.
_MOST_TEAM_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """rows: of a team, or of a tile; block: inputs a step of shrink, or columns a step of expand; columns:
    that a team or a tile has in a program of expand."""

    rows: int
    teams: bool
    block: int
    num_warps: int
    num_stages: int
    split: int = 1
    columns: int = 0


# Chosen by what the kernels without scales have, not measured.
def shrink_config(rows: int, width: int, element_size: int) -> Fp8Config:
    wide = 2 if element_size == 4 else 1
    if rows <= _MOST_TEAM_ROWS:
        split = -(-width // 1024) if rows <= 256 else min(4, -(-width // 1024))
        return Fp8Config(16, True, 256 // wide, 4, 3, split=split)
    return Fp8Config(64, False, 128 // wide, 4, 3, split=4 if rows <= 4096 else 1)


def expand_config(rows: int) -> Fp8Config:
    if rows <= _MOST_TEAM_ROWS:
        return Fp8Config(16, True, 128, 4, 1, columns=1024 if rows > 32 else 512)
    return Fp8Config(32, False, 128, 4, 1, columns=128)


def shrink(
    output: Tensor,
    x: Tensor,
    lora_a: Sequence[Tensor],
    step: Step,
    scale: float,
    of: Scaling,
    config: Fp8Config | None = None,
) -> None:
    """output [slices, rows, rank]: all of it is written, with zeros for rows without an adapter."""
    config = config or shrink_config(x.shape[0], x.shape[1], x.element_size())
    for first in range(0, len(lora_a), MAX_SLICES):
        part = slice(first, first + MAX_SLICES)
        some, into = replace(of, weights=of.weights[part]), output[part]
        with whole(into, config.split) as h:
            _shrink(h, x, lora_a[part], step, scale, some, config)


def expand(
    output: Tensor,
    h: Tensor,
    lora_b: Sequence[Tensor],
    step: Step,
    offset: int,
    of: Scaling,
    config: Fp8Config | None = None,
    *,
    add_inputs: bool,
) -> None:
    """h [slices, rows, rank]; the slices' columns follow each other from `offset` on."""
    config = config or expand_config(output.shape[0])
    for first in range(0, len(lora_b), MAX_SLICES):
        part = slice(first, first + MAX_SLICES)
        some = replace(of, weights=of.weights[part])
        _expand(output, h[part], lora_b[part], step, offset, some, config, add_inputs=add_inputs)
        offset += sum(weight.shape[-2] for weight in lora_b[part])


def _shrink(
    h: Tensor, x: Tensor, lora_a: Sequence[Tensor], step: Step, scale: float, of: Scaling, config: Fp8Config
) -> None:
    rows, (rank, width) = x.shape[0], lora_a[0].shape[-2:]
    group_n, group_k = of.group_n or rank, of.group_k or width
    stacks, scales, (row_scales, *row_strides) = three(lora_a), three(of.weights), _rows_of(of)
    strides = x.stride(0), lora_a[0].stride(0), lora_a[0].stride(-2), *row_strides
    block_rank = block_rank_of(rank)
    constants: dict[str, object] = {
        "K": width, "SLICES": len(lora_a), **_steps_constants(step, lora_a[0], config), "RANK": rank,
        "BLOCK_RANK": block_rank, "BLOCK_K": config.block if group_k >= width else min(config.block, group_k),
        "SPLIT": config.split, "GROUP_N": group_n, "GROUP_K": group_k, "X_SCALED": of.rows is not None,
        "ALIGNED": are_aligned(lora_a),
    }  # fmt: skip
    tensors = h, x, *stacks, row_scales, *scales
    launch = _launch(shrink_fp8_kernel, constants, config, tensors, strides)
    columns = -(-rank // block_rank) * len(lora_a)
    launch((config.split, columns, _places(rows, config)), *tensors, *step.groups, scale, rows, *strides)


def _expand(
    y: Tensor, h: Tensor, lora_b: Sequence[Tensor], step: Step, offset: int, of: Scaling, config: Fp8Config,
    *, add_inputs: bool,
) -> None:  # fmt: skip
    rows, rank, widths = y.shape[0], lora_b[0].shape[-1], tuple(weight.shape[-2] for weight in lora_b)
    group_n, group_k = of.group_n or max(widths), of.group_k or rank
    stacks, scales, (row_scales, *row_strides) = three(lora_b), three(of.weights), _rows_of(of)
    strides = y.stride(0), *(weight.stride(0) for weight in stacks), lora_b[0].stride(-2), *row_strides
    block_rank = block_rank_of(rank)
    constants: dict[str, object] = {
        **columns_of(widths, offset),
        "SLICES": len(lora_b), **_steps_constants(step, lora_b[0], config), "RANK": rank,
        "BLOCK_RANK": block_rank if group_k >= rank else min(block_rank, group_k), "COLUMNS": config.columns,
        "BLOCK_N": config.block, "GROUP_N": group_n, "GROUP_K": group_k, "H_SCALED": of.rows is not None,
        "ADD_INPUTS": add_inputs, "ALIGNED": are_aligned(lora_b),
    }  # fmt: skip
    tensors = y, h, *stacks, row_scales, *scales
    launch = _launch(expand_fp8_kernel, constants, config, tensors, strides)
    grid = -(-max(widths) // config.columns), len(lora_b), _places(rows, config)
    launch(grid, *tensors, *step.groups, rows, *strides)


def _launch(
    kernel: object, constants: dict[str, object], config: Fp8Config, tensors: Sequence[Tensor],
    numbers: Sequence[int],
) -> Launch:  # fmt: skip
    specialised = *form_of(*tensors), *int_form(*numbers), tensors[0].device
    return _compiled(kernel, tuple(constants.items()), config.num_warps, config.num_stages, specialised)


@lru_cache(maxsize=_MOST_LAUNCHES)
def _compiled(
    kernel: object, constants: tuple[tuple[str, object], ...], num_warps: int, num_stages: int,
    specialised: tuple[object, ...],
) -> Launch:  # fmt: skip
    """`specialised`: what else Triton compiles for."""
    return Launch(kernel, dict(constants), {"num_warps": num_warps, "num_stages": num_stages})


def _steps_constants(step: Step, weight: Tensor, config: Fp8Config) -> dict[str, object]:
    return {
        "MAX_LORAS": weight.shape[0], "NUM_IDS": step.num_ids, "LANES": triton.next_power_of_2(step.num_ids),
        "ROWS": config.rows, "TEAMS": config.teams,
    }  # fmt: skip


def _places(rows: int, config: Fp8Config) -> int:
    return rows if config.teams else -(-rows // config.rows)


def _rows_of(of: Scaling) -> tuple[Tensor, int, int]:
    """(scales of rows, or others that are not read; their strides, 0 where one value serves all)."""
    if of.rows is None:
        return of.weights[0], 0, 0
    strides = zip(of.rows.shape, of.rows.stride(), strict=True)
    by_row, by_group = (stride if size > 1 else 0 for size, stride in strides)
    return of.rows, by_row, by_group
