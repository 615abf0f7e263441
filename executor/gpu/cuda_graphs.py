"""Captures the model's kernels once, to start them later without Python and without launch costs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Other threads (adapters being loaded) may call CUDA while this one captures.
_MODE = "thread_local"


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` runs what was captured, and the calls between, in order, on the current stream. `out` is what
    the captured function returned: it holds the result of the last replay, until the next one of any capture
    of the same memory."""

    parts: tuple[Callable[[], object], ...]
    out: Tensor

    def replay(self) -> None:
        for part in self.parts:
            part()


class Capture:
    """One capture while it is being made."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._parts: list[Callable[[], object]] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode=_MODE)

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self._parts.append(graph.replay)

    def call_between(self, call: Callable[[], object]) -> None:
        """End this graph here, and begin another one behind `call`, which every replay makes anew; it does
        not run now. What it reads and writes must be memory of the capture (as `unowned`), or stay where it
        is."""
        self.end()
        self._parts.append(call)
        self.begin()

    @property
    def parts(self) -> tuple[Callable[[], object], ...]:
        return tuple(self._parts)


def unowned(tensor: Tensor) -> Tensor:
    """The same elements, whose memory it does not keep: right in the calls between the parts of a capture, in
    whose turn they are there. Kept, they would be two tensors a layer and captured size: gigabytes."""
    memory = tensor.untyped_storage()
    there = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())


class GraphMemory:
    """Captures that share their memory: only one of them runs at a time, all on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[Capture], Tensor]) -> Captured:
        """`run` must have run before, so that nothing compiles or allocates for the first time."""
        capture = Capture(self._pool)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            capture.begin()
            try:
                out = run(capture)
            finally:
                capture.end()
        return Captured(capture.parts, out)


@contextmanager
def without_collection() -> Iterator[None]:
    """The collector could free a graph or an event of somebody else in the middle of a capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
