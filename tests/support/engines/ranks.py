"""Ranks of a tensor-parallel group as real processes over gloo or NCCL, started once, used for many cases."""

import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from executor.distributed import SINGLE, ParallelGroup, connect, disconnect
from executor.ranks import leader

PATIENCE_S = 120.0
# One process of a test run imports torch, which takes seconds, and all ranks are its copies. An executor that
# a test starts as a process starts its ranks as ever, and so does everything that uses a GPU.
_COPIES = get_context("spawn" if torch.cuda.is_available() else "forkserver")
_COPIES.set_forkserver_preload(["executor.ranks.worker"])


def copy_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process start their ranks as copies, too."""
    monkeypatch.setattr(leader, "get_context", lambda method: _COPIES)


class RankPool:
    """Processes 0 to max(sizes) - 1; a case of size n runs on the first n of them."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(group, *arguments) on each rank, which must be importable; returns its results by rank.

        AssertionError with the tracebacks of the ranks where it raised.
        """
        for connection in self._connections[:size]:
            connection.send((size, function, arguments))
        results, failures = [], []
        for rank, connection in enumerate(self._connections[:size]):
            assert connection.poll(PATIENCE_S), f"rank {rank} of {size} does not answer"
            ok, value = connection.recv()
            (results if ok else failures).append(value if ok else f"rank {rank}: {value}")
        assert not failures, "\n".join(failures)
        return results


@contextmanager
def rank_pool(*sizes: int, device: str = "cpu", collective_s: float = 20.0) -> Iterator[RankPool]:
    """With device "cuda" each rank is on the GPU of its number, which is its current one. `collective_s`:
    after that a rank gives up on one that has failed before it."""
    world = max(sizes)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [_COPIES.Pipe() for _ in range(world)]
        processes = [
            _COPIES.Process(
                target=_serve,
                args=(rank, sizes, Path(folder) / "meeting", pair[1], device, collective_s),
                daemon=True,
            )
            for rank, pair in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        try:
            yield RankPool([pair[0] for pair in pairs])
        finally:
            for pair in pairs:
                pair[0].send(None)
            for process in processes:
                process.join(10)
                process.kill()


def _serve(
    rank: int,
    sizes: tuple[int, ...],
    meeting: Path,
    connection: Connection,
    device: str,
    collective_s: float,
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    connect(rank, max(sizes), meeting, f"cuda:{rank}" if device == "cuda" else device, collective_s)
    # Every rank takes part in making every group, also in those that it does not belong to.
    handles = {
        size: dist.new_group(list(range(size)), timeout=timedelta(seconds=collective_s))
        for size in sizes
        if size > 1
    }
    while (task := connection.recv()) is not None:
        size, function, arguments = task
        group = SINGLE if size == 1 else ParallelGroup(rank, size, handles[size])
        try:
            answer = (True, function(group, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)
    disconnect()
