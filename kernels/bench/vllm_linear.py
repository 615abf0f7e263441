"""vLLM's arguments and layout of weights on our kernels, against our own layout and vLLM's kernels."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.bench.inputs import LAYERS, MAX_LORAS, Case, Layer, WeightSet, make_case, runs, weight_sets
from kernels.bench.lora_linear import MAIN_RANK, POINTS, ours
from kernels.bench.peer import Peer, reference_layout
from kernels.bench.timing import Call, in_processes, time_calls
from kernels.vllm.dense import launches
from kernels.vllm.dense.step import Step
from kernels.vllm.kernel_meta import LoRAKernelMeta


@dataclass(frozen=True, slots=True)
class Row:
    """us of one layer's shrink and expand: by our own calls, by the wrapper's one operator, by the two
    operators apart, and by vLLM's, as installed and with tuned block sizes."""

    op: str
    layer: str
    tokens: int
    adapters: int
    rank: int
    own_us: float
    ours_us: float
    apart_us: float
    peer_us: float | None
    peer_tuned_us: float | None


def run(
    ranks: tuple[int, ...], peer: Path | None, tuned: Path | None, *, compiled: bool = False
) -> Iterator[dict[str, Any]]:
    jobs = [(layer, rank, peer, tuned) for rank in ranks for layer in LAYERS]
    if not compiled:
        in_processes(_compile, jobs)
    loaded = Peer.load(peer) if peer else None
    for layer, rank, _, _ in jobs:
        weights = weight_sets(layer, rank)
        for tokens, adapters in POINTS:
            case = make_case(layer, tokens, adapters, [rank] * MAX_LORAS, weights, [])
            yield asdict(_measure(case, rank, loaded, tuned))


def _compile(layer: Layer, rank: int, peer: Path | None, tuned: Path | None) -> None:
    """Run every point once in a process of its own: what it compiles is in the cache for the measurement."""
    loaded, weights = Peer.load(peer) if peer else None, [WeightSet.random(layer, rank)]
    for tokens, adapters in POINTS:
        case = make_case(layer, tokens, adapters, [rank] * MAX_LORAS, weights, [])
        for form in (ours, together, apart):
            form(case)(0)
        for folder in _folders(loaded, rank, tuned):
            assert loaded is not None
            loaded.pair(case, folder)(0)
    torch.cuda.synchronize()


def _folders(peer: Peer | None, rank: int, tuned: Path | None) -> list[Path | None]:
    if peer is None:
        return []
    return [None, tuned] if tuned and rank == MAIN_RANK else [None]


def _measure(case: Case, rank: int, peer: Peer | None, tuned: Path | None) -> Row:
    most = {256: 48, 512: 32, 2048: 12, 8192: 4}.get(case.tokens, 96)
    calls = min(most, max(8, len(case.metas) * len(case.weights)))
    times = time_calls([(form(case), calls) for form in (ours, together, apart)])
    peers: list[float] = []
    for folder in _folders(peer, rank, tuned):
        assert peer is not None
        peers += time_calls([(peer.pair(case, folder), calls)], rounds=9)
    point = (case.layer.name, case.tokens, case.adapters, rank)
    return Row("vllm_linear", *point, *times, *(*peers, None, None)[:2])


def together(case: Case) -> Call:
    """What `PunicaWrapperGPU.add_lora_linear` runs."""
    steps, sets = _steps(case), _sets(case)

    def call(index: int) -> None:
        lora_a, lora_b = sets[(index // len(steps)) % len(sets)]
        turn = index % len(case.xs)
        step = steps[index % len(steps)]
        launches.add_pair(case.ys[turn], case.xs[turn], lora_a, lora_b, step, 0.5, add_inputs=True)

    return call


def apart(case: Case) -> Call:
    """What `lora_shrink` and `lora_expand` run, one after the other."""
    steps, sets = _steps(case), _sets(case)
    rank, slices = case.weights[0].lora_a[0].shape[1], len(case.layer.slices)
    hidden = [torch.empty(slices, case.tokens, rank, device="cuda") for _ in case.xs]

    def call(index: int) -> None:
        lora_a, lora_b = sets[(index // len(steps)) % len(sets)]
        turn = index % len(case.xs)
        step = steps[index % len(steps)]
        launches.shrink(hidden[turn], case.xs[turn], lora_a, step, 0.5)
        launches.expand(case.ys[turn], hidden[turn], lora_b, step, 0, add_inputs=True)

    return call


def _sets(case: Case) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [reference_layout(case, number) for number in range(len(case.weights))]


def _steps(case: Case) -> list[Step]:
    steps = []
    for rotation in range(len(case.metas)):
        meta = LoRAKernelMeta.make(MAX_LORAS, case.tokens, "cuda")
        slots = [slot for slot, rows in runs(case.tokens, case.adapters, rotation) for _ in range(rows)]
        meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32))
        steps.append(Step(*meta.meta_args(case.tokens, False)))
    return steps
