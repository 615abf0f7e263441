"""FP8 adapters of Llama-3.1-8B's gate_up layer against bfloat16 ones and another implementation."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.bench.inputs import LAYERS, MAX_LORAS, Case, copy_rate, make_case, runs, weight_sets
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.launching.fp8 import hidden_scales_shape, quantized
from kernels.launching.tuning import ExpandConfig
from kernels.lora_expand import lora_expand
from kernels.lora_expand_fp8 import lora_expand_fp8
from kernels.lora_linear import add_pair
from kernels.lora_linear_fp8 import add_pair_fp8
from kernels.lora_shrink_fp8 import lora_shrink_fp8
from kernels.metadata.launch_plan import ROWS_PER_TILE

RANK = 16
POINTS = ((1, 1), (8, 1), (8, 8), (64, 1), (64, 8), (64, 64), (512, 64), (2048, 1), (2048, 8), (2048, 64))
LAYER = LAYERS[2]
FP8 = torch.float8_e4m3fn
# Columns and warps of FP8 expand by its rows, beside the chosen ones.
_EXPAND = {
    1: ((256, 2), (256, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4)),
    16: ((64, 2), (64, 4), (128, 2), (128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 8), (1024, 16)),
    64: ((64, 4), (128, 4), (128, 8), (256, 8)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """us of one call. fp8: e4m3 weights and float32 h; w8a8: e4m3 h too, which shrink quantizes.

    The pairs are shrink and expand as the product launches them; the floors are expand's: B, y read and
    written, h. rows, block_n and num_warps are a candidate's for FP8 expand, none for the chosen ones.
    """

    op: str
    tokens: int
    adapters: int
    rows: int | None
    block_n: int | None
    num_warps: int | None
    bf16_us: float
    fp8_us: float
    w8a8_us: float
    bf16_pair_us: float
    fp8_pair_us: float
    w8a8_pair_us: float
    bf16_floor_us: float
    fp8_floor_us: float
    peer_us: float | None


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    a: list[Tensor]
    a_scales: list[Tensor]
    b: list[Tensor]
    b_scales: list[Tensor]


def run(peer_folder: Path | None, *, tune: bool, compiled: bool) -> Iterator[dict[str, Any]]:
    if not compiled:
        in_processes(compile_job, jobs(peer_folder, tune))
    for point in POINTS:
        yield from map(asdict, _rows(point, peer_folder, tune))


def jobs(peer_folder: Path | None, tune: bool) -> list[tuple[tuple[int, int], Path | None, bool]]:
    """Arguments of compile_job."""
    return [(point, peer_folder, tune) for point in POINTS]


def compile_job(point: tuple[int, int], peer_folder: Path | None, tune: bool) -> None:
    case, weights = _case(*point, sets=1)
    for config in _configs(case, tune):
        for call in _calls(case, weights, config):
            call(0)
    if peer_folder:
        _peer(case, weights, peer_folder)(0)
    torch.cuda.synchronize()


def _rows(point: tuple[int, int], peer_folder: Path | None, tune: bool) -> Iterator[Row]:
    case, weights = _case(*point, sets=2)
    calls = max(8, min(96, 16384 // case.tokens, 2 * len(case.metas)))
    peer_us = None
    if peer_folder:
        (peer_us,) = time_calls([(_peer(case, weights, peer_folder), calls)], rounds=7)
    for config in _configs(case, tune):
        times = time_calls([(call, calls) for call in _calls(case, weights, config)], rounds=9)
        alone, pairs = times[:3], times[3:]
        floors = _floor(case, 2), _floor(case, 1)
        yield Row("lora_fp8", *point, *_size(config), *_three(alone), *_three(pairs), *floors, peer_us)


def _size(config: ExpandConfig | None) -> tuple[int | None, int | None, int | None]:
    return (config.rows, config.block_n, config.num_warps) if config else (None, None, None)


def _three(times: list[float]) -> tuple[float, float, float]:
    return times[0], times[1], times[2]


def _case(tokens: int, adapters: int, sets: int) -> tuple[Case, list[Fp8Weights]]:
    sets_made = weight_sets(LAYER, RANK)[:sets]
    case = make_case(LAYER, tokens, adapters, [RANK] * MAX_LORAS, sets_made, [])
    weights = []
    for made in sets_made:
        a, b = (
            [quantized(w, FP8, (0, 0)) for w in made.lora_a],
            [quantized(w, FP8, (0, 0)) for w in made.lora_b],
        )
        values = [*(v for v, _ in a), *(v for v, _ in b)]
        arena = torch.cat([v.flatten(1).view(torch.uint8) for v in values], 1)
        parts = torch.split(arena, [v[0].numel() for v in values], 1)
        shaped = [part.view(FP8).view(v.shape) for part, v in zip(parts, values, strict=True)]
        slices = len(made.lora_a)
        weights.append(Fp8Weights(shaped[:slices], [s for _, s in a], shaped[slices:], [s for _, s in b]))
    return case, weights


def _configs(case: Case, tune: bool) -> list[ExpandConfig | None]:
    plan, configs = case.metas[0].plan, list[ExpandConfig | None]([None])
    for rows in (plan.rows_per_item, *((ROWS_PER_TILE,) if plan.tiles else ())) if tune else ():
        block_rank = plan.block_rank if rows == 1 else max(16, plan.block_rank)
        configs += [ExpandConfig(rows, block_rank, n, warps) for n, warps in _EXPAND[rows]]
    return configs


def _calls(case: Case, weights: list[Fp8Weights], config: ExpandConfig | None) -> list[Call]:
    """Expand of bfloat16, FP8 and FP8 x FP8, then the pairs."""
    shape = (len(LAYER.slices), case.tokens, RANK)
    h = torch.randn(shape, device="cuda")
    h8, h_scales = (
        torch.empty(shape, device="cuda", dtype=FP8),
        torch.empty(hidden_scales_shape(*shape), device="cuda"),
    )
    h8.copy_(h)
    h_scales.fill_(1)
    return [
        partial(_bf16, case, h),
        partial(_fp8, case, weights, h, None, config),
        partial(_fp8, case, weights, h8, h_scales, config),
        partial(_bf16, case, None),
        partial(_fp8_pair, case, weights, config),
        partial(_w8a8_pair, case, weights, h8, h_scales, config),
    ]


def _turn(case: Case, sets: int, index: int) -> tuple[int, int, int]:
    metas = len(case.metas)
    return index % metas, (index // metas) % sets, index % len(case.xs)


def _bf16(case: Case, h: Tensor | None, index: int) -> None:
    """The pair where h is None."""
    step, number, turn = _turn(case, len(case.weights), index)
    own, meta, y, x = case.weights[number], case.metas[step], case.ys[turn], case.xs[turn]
    if h is None:
        add_pair(y, x, own.lora_a, own.lora_b, case.ranks, case.scales, case.column_starts, meta)
    else:
        lora_expand(y, h, own.lora_b, case.ranks, case.column_starts, meta)


def _fp8(
    case: Case,
    weights: list[Fp8Weights],
    h: Tensor,
    h_scales: Tensor | None,
    config: ExpandConfig | None,
    index: int,
) -> None:
    step, number, turn = _turn(case, len(weights), index)
    own, tables = weights[number], (case.ranks, case.column_starts, case.metas[step])
    lora_expand_fp8(case.ys[turn], h, own.b, own.b_scales, *tables, h_scales=h_scales, config=config)


def _fp8_pair(case: Case, weights: list[Fp8Weights], config: ExpandConfig | None, index: int) -> None:
    step, number, turn = _turn(case, len(weights), index)
    own, tables = weights[number], (case.ranks, case.scales, case.column_starts, case.metas[step])
    y, x = case.ys[turn], case.xs[turn]
    add_pair_fp8(y, x, own.a, own.a_scales, own.b, own.b_scales, *tables, config=config)


def _w8a8_pair(
    case: Case,
    weights: list[Fp8Weights],
    h: Tensor,
    h_scales: Tensor,
    config: ExpandConfig | None,
    index: int,
) -> None:
    step, number, turn = _turn(case, len(weights), index)
    own, meta = weights[number], case.metas[step]
    tables = case.ranks, case.scales, meta
    lora_shrink_fp8(h, case.xs[turn], own.a, own.a_scales, *tables, h_scales=h_scales)
    _fp8(case, weights, h, h_scales, config, index)


def _floor(case: Case, weight_bytes: int) -> float:
    weights = case.adapters * weight_bytes * RANK * LAYER.columns
    rows = 2 * 2 * case.tokens * LAYER.columns + 4 * case.tokens * RANK * len(LAYER.slices)
    return (weights + rows) / copy_rate() * 1e6


def _peer(case: Case, weights: list[Fp8Weights], folder: Path) -> Call:
    """Its FP8 x FP8 expand with one scale a tensor; quantizing h is not counted."""
    sys.path.insert(0, str(folder))
    ops = importlib.import_module("vllm.lora.ops.triton_ops")
    b = [w.transpose(1, 2).contiguous().unsqueeze(1) for w in weights[0].b]
    scales = [s.flatten().contiguous() for s in weights[0].b_scales]
    h = torch.randn(len(LAYER.slices), case.tokens, RANK, device="cuda").to(FP8)
    of_h, metas = torch.ones(1, device="cuda"), []
    for rotation in range(len(case.metas)):
        meta = ops.LoRAKernelMeta.make(MAX_LORAS, case.tokens, "cuda")
        slots = [slot for slot, rows in runs(case.tokens, case.adapters, rotation) for _ in range(rows)]
        meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device="cuda"))
        arguments = list(meta.meta_args(case.tokens, False))
        arguments[-1] = MAX_LORAS + 1
        metas.append(arguments)

    def call(index: int) -> None:
        y = case.ys[index % len(case.ys)]
        ops.lora_expand_fp8(h, b, y, *metas[index % len(metas)], scales, of_h, 0, True, 0, 0, True, False)

    call(0)
    torch.cuda.synchronize()
    return call
