"""Times of CUDA-graph replays: many calls a graph, over rotating inputs, so none finds its data in L2."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

Call = Callable[[int], object]


def in_processes(job: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """job(*arguments[i]) for all i, in fresh processes: what they compile, all others find in Triton's cache
    folder, and CUDA does not survive a fork. Raises as jobs do."""
    workers = min(len(arguments), max(1, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(job, arguments, chunksize=1)


def capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of call(0) .. call(calls - 1), run once before (compiles) and once after (warms)."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_times(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> list[list[float]]:
    """us of every replay, [graphs][rounds]. Graphs take turns: clocks and heat drift alike for all."""
    events = [[(_event(), _event()) for _ in range(rounds)] for _ in graphs]
    for number in range(rounds):
        for graph, pairs in zip(graphs, events, strict=True):
            begin, end = pairs[number]
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [[begin.elapsed_time(end) * 1e3 for begin, end in pairs] for pairs in events]


def time_calls(calls: Sequence[tuple[Call, int]], rounds: int = 15) -> list[float]:
    """Median us of one call for each (call, calls in its graph), measured in turns."""
    graphs = [capture(call, count) for call, count in calls]
    times = replay_times(graphs, rounds)
    return [median(one) / count for one, (_, count) in zip(times, calls, strict=True)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
