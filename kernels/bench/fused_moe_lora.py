"""An expert layer's LoRA against the byte floor and another implementation: w13, w2 and alignment."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.bench.moe_inputs import POINTS, Case, Layer, Points, Shape, floor_us, make_case
from kernels.bench.peer_moe import MoEPeer
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.fused_moe_lora import fused_moe_lora, moe_blocks
from kernels.launching.moe_blocks import MoEBlocks


@dataclass(frozen=True, slots=True)
class Row:
    """us of one call. ours and peer: alignment, w13 and w2; base: the other's products without LoRA."""

    op: str
    shape: str
    tokens: int
    adapters: int
    ours_us: float
    align_us: float
    w13_us: float
    w2_us: float
    floor_us: float
    peer_us: float | None
    base_us: float | None


def run(points: Points, peer_folder: Path | None, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """Rows one by one, so that the caller can keep what is there when a lease ends."""
    if not compiled:
        in_processes(compile_job, jobs(points, peer_folder))
    peer = MoEPeer.load(peer_folder) if peer_folder else None
    for shape, of_shape in points:
        layer = Layer.random(shape)
        weights = peer.weights(layer) if peer else None
        for tokens, adapters in of_shape:
            case = make_case(layer, tokens, adapters)
            peer_us, base_us = None, None
            if peer and weights:
                calls = peer.lora(case, weights), peer.base(case, weights)
                peer_us, base_us = time_calls([(call, case.calls) for call in calls], rounds=9)
            yield asdict(_measure(case, peer_us, base_us))


def jobs(points: Points, peer_folder: Path | None) -> list[tuple[Shape, tuple[int, int] | None, Path | None]]:
    """Arguments of compile_job: the peer's shapes, whose weights take memory, and our points."""
    peers = [(shape, None, peer_folder) for shape, _ in points if peer_folder]
    return [*peers, *((shape, point, None) for shape, of_shape in points for point in of_shape)]


def compile_job(shape: Shape, point: tuple[int, int] | None, peer_folder: Path | None) -> None:
    """Run once in a process of its own: what it compiles is in the cache for the measurement."""
    layer = Layer.random(shape)
    if point is not None:
        ours(make_case(layer, *point))(0)
    if peer_folder:
        peer = MoEPeer.load(peer_folder)
        weights = peer.weights(layer)
        for of_peer in POINTS:
            case = make_case(layer, *of_peer)
            peer.lora(case, weights)(0)
            peer.base(case, weights)(0)
    torch.cuda.synchronize()


def _measure(case: Case, peer_us: float | None, base_us: float | None) -> Row:
    made = [blocks(case, index) for index in range(case.calls)]
    parts: tuple[Call, ...] = (
        ours(case),
        lambda index: _forget(blocks(case, index)),
        lambda index: add_w13(case, index, made[index % len(made)]),
        lambda index: add_w2(case, index, made[index % len(made)]),
    )
    times = [time_calls([(part, case.calls)])[0] for part in parts]
    point = case.layer.shape.name, case.tokens, case.adapters
    whole, align, w13, w2 = times
    return Row("fused_moe_lora", *point, whole, align, w13, w2, floor_us(case), peer_us, base_us)


def _forget(_: MoEBlocks) -> None:
    pass


def ours(case: Case) -> Call:
    def call(index: int) -> None:
        made = blocks(case, index)
        add_w13(case, index, made)
        add_w2(case, index, made)

    return call


def blocks(case: Case, index: int) -> MoEBlocks:
    meta = case.metas[index % len(case.metas)]
    return moe_blocks(case.choices[index % len(case.choices)], case.layer.shape.experts, meta)


def add_w13(case: Case, index: int, made: MoEBlocks) -> None:
    w = case.layer.w13
    fused_moe_lora(case.y13, case.x, w.lora_a, w.lora_b, w.ranks, w.scales, w.column_starts, made)


def add_w2(case: Case, index: int, made: MoEBlocks) -> None:
    w, routed = case.layer.w2, case.weights[index % len(case.weights)]
    tables = w.ranks, w.scales, w.column_starts
    fused_moe_lora(case.y2, case.inner, w.lora_a, w.lora_b, *tables, made, routed_weights=routed)
