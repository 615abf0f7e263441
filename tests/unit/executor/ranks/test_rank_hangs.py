"""A rank that is stopped, or killed, in any part of its work: the executor goes down within its timeouts."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from adapter_store import DiskStore
from executor.build import build_engine
from executor.config import ExecutorConfig
from executor.engine import Engine
from executor.errors import RankLost
from lorafleet.v1 import executor_pb2_grpc
from tests.support.engines.driver import SMALL, greedy
from tests.support.services.cluster import wait_until
from tests.support.services.processes import is_running
from tests.unit.executor.ranks.test_ranks import rank_processes as children
from tests.unit.executor.test_main import (
    Start,
    _held_open,
    endless,
    log_until,
    rank_processes,
    start,
)

__all__ = ["start"]  # a fixture

STOPPED_OR_DEAD = pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "dead"])
TWO = (
    "--listen", "127.0.0.1:0", "--tensor-parallel-size", "2", "--torch-threads", "1", "--metrics-port", "-1",
)  # fmt: skip
STEPS = ("--step-timeout", "4")
STARTS = ("--start-timeout", "4")  # not for what has to come up first: a busy machine may need longer
PATIENCE_S = 90  # far above what the timeouts below allow


def goes_down(process: "subprocess.Popen[str]", rank: int) -> str:
    """Exit code 1, nothing left; returns what is left of its log."""
    assert process.wait(PATIENCE_S) == 1
    wait_until(lambda: not is_running(rank), "the rank is ended too")
    return process.stderr.read() if process.stderr else ""


def test_a_rank_that_stops_in_mid_stream_ends_the_executor(start: Start, tiny_base: Path) -> None:
    process = start("--model", str(tiny_base), *TWO, *STEPS)
    port = log_until(process, r"listening on .*:(\d+)").group(1)
    log_until(process, "ready")
    (rank,) = rank_processes(process.pid)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Execute(_held_open([endless("a")]))
        next(event for event in call if event.WhichOneof("event") == "step")
        os.kill(rank, signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as error:
            for _ in call:
                pass
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "the executor ends" in goes_down(process, rank)


@STOPPED_OR_DEAD
def test_a_rank_that_does_not_come_up_ends_the_executor(
    start: Start, tiny_base: Path, blow: signal.Signals
) -> None:
    process = start("--model", str(tiny_base), *TWO, *STEPS, *STARTS)
    log_until(process, "loading the model")
    wait_until(lambda: bool(rank_processes(process.pid)), "there is another rank")
    (rank,) = rank_processes(process.pid)
    os.kill(rank, blow)
    assert "the executor ends" in goes_down(process, rank)


class Running:
    """An engine over two ranks in this process, with short timeouts."""

    def __init__(self, model: Path, store: DiskStore, folder: Path, steps_ahead: str) -> None:
        self.lost = threading.Event()
        config = ExecutorConfig(
            model=str(model),
            **(SMALL | {"store": str(folder), "tensor_parallel_size": 2, "torch_threads": 1}),
            async_scheduling=steps_ahead,
            step_timeout=4.0,
            load_timeout=4.0,
        )
        self.engine: Engine = build_engine(config, store, lost=lambda error: self.lost.set())
        (self.rank,) = children()

    def step_until(self, done: Callable[[], bool]) -> None:
        wait_until(lambda: self.engine.step() is not None and done(), "the engine gets there")


@pytest.fixture
def running(
    request: pytest.FixtureRequest, tiny_base: Path, tiny_store: DiskStore, store_folder: Path
) -> Iterator[Running]:
    made = Running(tiny_base, tiny_store, store_folder, getattr(request, "param", "false"))
    with closing(made.engine):
        yield made
    assert not children()


@STOPPED_OR_DEAD
def test_a_rank_that_does_not_load_is_lost(
    running: Running, digests: list[str], blow: signal.Signals
) -> None:
    os.kill(running.rank.pid, blow)
    running.engine.prefetch(digests[0])
    running.step_until(running.lost.is_set)


@STOPPED_OR_DEAD
def test_a_rank_that_does_not_copy_is_lost(
    running: Running, digests: list[str], blow: signal.Signals
) -> None:
    """The adapter is in the host memory of both ranks, and on its way into a slot."""
    running.engine.prefetch(digests[0])
    running.step_until(lambda: digests[0] in running.engine.pager.host)
    os.kill(running.rank.pid, blow)
    running.engine.add(greedy("a", range(3, 20), digest=digests[0]))
    with pytest.raises(RankLost):
        running.step_until(lambda: False)
    assert running.lost.wait(PATIENCE_S)


@STOPPED_OR_DEAD
@pytest.mark.parametrize("running", ["true"], indirect=True, ids=["ahead"])
def test_a_rank_that_leaves_while_a_step_runs_is_lost(running: Running, blow: signal.Signals) -> None:
    """With the next step planned already, whose first tokens are still to come from the one under way."""
    running.engine.add(greedy("a", range(3, 20), max_new_tokens=400))
    running.step_until(lambda: bool(running.engine.step().tokens))
    assert running.engine.step().runs
    os.kill(running.rank.pid, blow)
    with pytest.raises(RankLost):
        running.step_until(lambda: False)
