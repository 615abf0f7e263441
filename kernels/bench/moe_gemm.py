"""The base model's expert products: ours, torch's grouped product, and other implementations' experts."""

import importlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.bench.inputs import copy_rate
from kernels.bench.moe_inputs import MAX_LORAS, Case, Layer, Points, Shape, make_case
from kernels.bench.peer_moe import MoEPeer
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.expert_product import align_experts, expert_product
from kernels.launching.moe_tuning import GemmConfig, gemm_block_size, gemm_config
from kernels.moe_gemm import moe_gemm
from kernels.moe_lora_align import moe_align_block_size

_TUNED = {
    16: ((64, 128, 4, 4), (128, 128, 4, 3), (64, 256, 4, 3), (128, 64, 4, 5), (32, 256, 4, 4)),
    32: ((128, 128, 4, 3), (64, 128, 4, 4)),
    64: ((128, 64, 4, 4), (256, 64, 8, 4), (128, 128, 8, 3), (128, 64, 8, 4)),
    128: ((256, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (256, 64, 8, 4)),
}


def run(
    points: Points, peer_folder: Path | None, *, tune: bool, flashinfer: bool, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Rows (op, shape, tokens, us of align + w13 + SiLU-mul + w2 + sum, as is or with a configuration, of
    others in their place, and the floor). The others: torch's grouped_mm with its gathers, FlashInfer's fused
    experts, vLLM's."""
    if not compiled:
        in_processes(compile_job, jobs(points, tune))
    peer = MoEPeer.load(peer_folder) if peer_folder else None
    for shape, of_shape in points:
        layer = Layer.random(shape)
        w13, w2 = _weights(shape)
        of_peer = peer.weights(layer) if peer else None
        for tokens in sorted({tokens for tokens, _ in of_shape}):
            case = make_case(layer, tokens, MAX_LORAS if tokens >= MAX_LORAS else 1)
            row = {"op": "moe_gemm", "shape": shape.name, "tokens": tokens}
            calls = {"ours": _ours(case, w13, w2), "grouped_mm": _grouped(case, w13, w2)}
            if flashinfer:
                calls["flashinfer"] = _flashinfer(case, w13, w2)
            if peer and of_peer:
                calls["peer"] = peer.base(case, of_peer)
            times = time_calls([(call, case.calls) for call in calls.values()], rounds=7)
            found = {f"{name}_us": us for name, us in zip(calls, times, strict=True)}
            yield {**row, **found, "floor_us": _floor(case)}
            for size, config in _configs(tokens * shape.topk, shape.experts) if tune else ():
                call = _product(case, w13, size, config)
                (us,) = time_calls([(call, case.calls)], rounds=5)
                yield {**row, "product": "w13", "size": size, **asdict(config), "us": us}


def _configs(pairs: int, experts: int) -> Iterator[tuple[int, GemmConfig]]:
    sizes, chosen = list(_TUNED), gemm_block_size(pairs, experts)
    place = sizes.index(chosen)
    for size in sizes[max(0, place - 1) : place + 2]:
        for config in _TUNED[size]:
            yield size, GemmConfig(size, *config)


def jobs(points: Points, tune: bool) -> list[tuple[Shape, int, bool]]:
    """Arguments of compile_job."""
    return [(shape, size, tune) for shape, _ in points for size in _TUNED]


def compile_job(shape: Shape, size: int, tune: bool) -> None:
    layer, (w13, _) = Layer.random(shape), _weights(shape)
    case = make_case(layer, 64, 1)
    configs = [gemm_config(size, 2), *(GemmConfig(size, *config) for config in _TUNED[size] if tune)]
    for config in configs:
        _product(case, w13, size, config)(0)
    torch.cuda.synchronize()


def _weights(shape: Shape) -> tuple[Tensor, Tensor]:
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    w13 = torch.randn(shape.experts, 2 * shape.inner, shape.hidden, **kinds) * 0.02  # type: ignore[call-overload]
    return w13, torch.randn(shape.experts, shape.hidden, shape.inner, **kinds) * 0.02  # type: ignore[call-overload]


def _product(case: Case, w13: Tensor, size: int, config: GemmConfig) -> Call:
    def call(index: int) -> None:
        choices = case.choices[index % len(case.choices)]
        blocks = moe_align_block_size(choices, case.layer.shape.experts, size)
        moe_gemm(case.y13, case.x, w13, blocks, config=config)

    return call


def _ours(case: Case, w13: Tensor, w2: Tensor) -> Call:
    inner = case.layer.shape.inner

    def call(index: int) -> None:
        turn = index % len(case.choices)
        blocks = align_experts(case.choices[turn], len(w13))
        expert_product(case.y13, case.x, w13, blocks)
        h = F.silu(case.y13[:, :inner]) * case.y13[:, inner:]
        expert_product(case.y2, h, w2, blocks, routed_weights=case.weights[turn])
        case.y2.view(case.tokens, -1, case.y2.shape[1]).sum(1)

    return call


def _grouped(case: Case, w13: Tensor, w2: Tensor) -> Call:
    inner, topk, experts = case.layer.shape.inner, case.layer.shape.topk, len(w13)
    numbers = torch.arange(experts, device="cuda", dtype=torch.int32)

    def call(index: int) -> None:
        turn = index % len(case.choices)
        sorted_experts, order = case.choices[turn].flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        y = F.grouped_mm(case.x[order // topk], w13.transpose(1, 2), offs=ends)
        h = F.silu(y[:, :inner]) * y[:, inner:]
        y = F.grouped_mm(h, w2.transpose(1, 2), offs=ends) * case.weights[turn].flatten()[order, None].to(
            y.dtype
        )
        case.y2[order] = y
        case.y2.view(case.tokens, -1, case.y2.shape[1]).sum(1)

    return call


def _flashinfer(case: Case, w13: Tensor, w2: Tensor) -> Call:
    """Compiled with nvcc at the first call, which takes minutes."""
    experts: Any = importlib.import_module("flashinfer.fused_moe").cutlass_fused_moe
    y = torch.empty_like(case.x)

    def call(index: int) -> None:
        turn = index % len(case.choices)
        experts(case.x, case.choices[turn], case.weights[turn], w13, w2, case.x.dtype, [], output=y)

    return call


def _floor(case: Case) -> float:
    """The larger of bytes at the copy rate (chosen experts' weights, y13 and y2 once) and of operations."""
    shape, pairs = case.layer.shape, case.tokens * case.layer.shape.topk
    chosen = [int(torch.bincount(choices.flatten()).count_nonzero()) for choices in case.choices]
    experts = sum(chosen) / len(chosen)
    weights = 2.0 * experts * 3 * shape.hidden * shape.inner
    rows = 2.0 * pairs * (3 * shape.inner + shape.hidden)
    return max((weights + rows) / copy_rate(), 6.0 * pairs * shape.hidden * shape.inner / 786e12) * 1e6
