"""One linear layer's LoRA, against the base product, the byte floor and another implementation."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.bench.inputs import (
    LAYERS,
    MAX_LORAS,
    Case,
    Layer,
    WeightSet,
    base_weights,
    floor_us,
    lora_flops,
    make_case,
    weight_sets,
)
from kernels.bench.peer import Peer
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.launching.side_stream import SideStream
from kernels.lora_linear import add_pair, add_pair_beside

POINTS = (
    *((tokens, adapters) for tokens in (1, 8, 32, 64, 128) for adapters in (1, 8, 64) if adapters <= tokens),
    (32, 32),
    (256, 64),
    *((tokens, adapters) for tokens in (512, 2048, 8192) for adapters in (1, 8, 64)),
)
# The tuned files of the other implementation exist for this rank; added_us is measured for it too.
MAIN_RANK = 16


@dataclass(frozen=True, slots=True)
class Options:
    ranks: tuple[int, ...]
    points: tuple[tuple[int, int], ...]
    peer: Path | None
    peer_tuned: Path | None


@dataclass(frozen=True, slots=True)
class Row:
    """us of one call. added_us and beside_us (rank 16): base and LoRA in one graph, less the base alone, in
    turns; the pair behind the base, and with its shrink on a second stream beside the base. flops, floor_us:
    the pair's work, and its bytes at the card's copy rate."""

    op: str
    layer: str
    tokens: int
    adapters: int
    rank: int
    ours_us: float
    added_us: float | None
    beside_us: float | None
    peer_us: float | None
    peer_tuned_us: float | None
    base_us: float
    floor_us: float
    flops: int


def run(options: Options, *, compiled: bool = False) -> Iterator[dict[str, Any]]:
    """Rows one by one, so that the caller can keep what is there when a lease ends.

    compiled: what is measured is in Triton's cache already.
    """
    jobs = [(layer, rank, options) for rank in options.ranks for layer in LAYERS]
    if not compiled:
        in_processes(_compile, jobs)
    peer = Peer.load(options.peer) if options.peer else None
    for job in jobs:
        yield from map(asdict, _layer_rows(*job, peer))


def _compile(layer: Layer, rank: int, options: Options) -> None:
    """Run every point once in a process of its own: what it compiles is in the cache for the measurement."""
    peer = Peer.load(options.peer) if options.peer else None
    weights = [WeightSet.random(layer, rank)]
    for tokens, adapters in options.points:
        case = make_case(layer, tokens, adapters, [rank] * MAX_LORAS, weights, [])
        ours(case)(0)
        for form in _peer_forms(peer, case, rank, options):
            form()(0)
    torch.cuda.synchronize()


def _peer_forms(peer: Peer | None, case: Case, rank: int, options: Options) -> list[Callable[[], Call]]:
    """The other implementation by default, then tuned: each a function that selects it and gives its call."""
    if peer is None:
        return []
    tuned = [options.peer_tuned] if options.peer_tuned and rank == MAIN_RANK else []
    return [partial(peer.pair, case, folder) for folder in (None, *tuned)]


def _layer_rows(layer: Layer, rank: int, options: Options, peer: Peer | None) -> Iterator[Row]:
    weights, bases = weight_sets(layer, rank), base_weights(layer)
    for tokens, adapters in options.points:
        yield _measure(
            make_case(layer, tokens, adapters, [rank] * MAX_LORAS, weights, bases), rank, options, peer
        )


def _measure(case: Case, rank: int, options: Options, peer: Peer | None) -> Row:
    # Enough calls to walk over all slots and weight sets, in a graph of some milliseconds.
    most = {256: 48, 512: 32, 2048: 12, 8192: 4}.get(case.tokens, 96)
    calls = min(most, max(8, len(case.metas) * len(case.weights)))
    (ours_us,) = time_calls([(ours(case), calls)])
    added_us = beside_us = None
    if rank == MAIN_RANK:
        forms = (base(case), base_and_ours(case), base_beside_ours(case))
        base_us, both_us, two_us = time_calls([(form, min(calls, 48)) for form in forms], rounds=25)
        added_us, beside_us = both_us - base_us, two_us - base_us
    else:
        (base_us,) = time_calls([(base(case), calls)], rounds=5)
    peers: list[float] = []
    for form in _peer_forms(peer, case, rank, options):
        peers += time_calls([(form(), calls)], rounds=9)
    peer_us, tuned_us = (*peers, None, None)[:2]
    floor = floor_us(case.layer, case.tokens, case.adapters, rank)
    point = (case.layer.name, case.tokens, case.adapters, rank)
    flops = lora_flops(case.layer, case.tokens, rank)
    return Row("lora_linear", *point, ours_us, added_us, beside_us, peer_us, tuned_us, base_us, floor, flops)


def ours(case: Case) -> Call:
    starts, metas, sets = case.column_starts, case.metas, case.weights

    def call(index: int) -> None:
        weights = sets[(index // len(metas)) % len(sets)]
        turn = index % len(case.xs)
        add_pair(
            case.ys[turn],
            case.xs[turn],
            weights.lora_a,
            weights.lora_b,
            case.ranks,
            case.scales,
            starts,
            metas[index % len(metas)],
        )

    return call


def base(case: Case) -> Callable[[int], Tensor]:
    def call(index: int) -> Tensor:
        turn = index % len(case.xs)
        return torch.mm(case.xs[turn], case.bases[index % len(case.bases)].t(), out=case.ys[turn])

    return call


def base_and_ours(case: Case) -> Call:
    first, second = base(case), ours(case)

    def call(index: int) -> None:
        first(index)
        second(index)

    return call


def base_beside_ours(case: Case) -> Call:
    product, side, starts = base(case), SideStream("cuda"), case.column_starts
    metas, sets = case.metas, case.weights

    def call(index: int) -> None:
        weights, turn = sets[(index // len(metas)) % len(sets)], index % len(case.xs)
        tables = case.ranks, case.scales, starts, metas[index % len(metas)]
        add_pair_beside(partial(product, index), side, case.xs[turn], weights.lora_a, weights.lora_b, *tables)

    return call
