"""The executor as a process: signals, exit codes, and one clear line for a wrong setting."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from adapter_store import open_store
from lorafleet.v1 import executor_pb2, executor_pb2_grpc
from tests.support.services.cluster import wait_until
from tests.support.services.processes import children, is_running

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []
    store = str(tmp_path / "store")
    open_store(store)  # an executor makes none

    def run(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "executor", "--store", store, *arguments]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def log_until(process: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"the process ended without saying {pattern!r}")


def endless(name: str) -> executor_pb2.ExecutorCommand:
    dispatch = executor_pb2.Dispatch(dispatch_id=name, prompt_token_ids=[3, 4, 5])
    dispatch.stopping.ignore_eos = True
    return executor_pb2.ExecutorCommand(dispatch=executor_pb2.DispatchBatch(dispatches=[dispatch]))


def test_a_second_signal_ends_at_once(start: Start, tiny_base: Path) -> None:
    process = start("--model", str(tiny_base), "--listen", "127.0.0.1:0", "--metrics-port", "-1")
    port = log_until(process, r"listening on .*:(\d+)").group(1)
    log_until(process, "ready")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Execute(_held_open([endless(f"{number}") for number in range(60)]))
        next(event for event in call if event.WhichOneof("event") == "step")
        process.send_signal(signal.SIGTERM)
        log_until(process, "draining")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1


def test_a_drain_lets_a_stream_finish(start: Start, tiny_base: Path) -> None:
    process = start("--model", str(tiny_base), "--listen", "127.0.0.1:0", "--metrics-port", "-1")
    port = log_until(process, r"listening on .*:(\d+)").group(1)
    log_until(process, "ready")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        commands: list[executor_pb2.ExecutorCommand] = [endless("a")]
        call = stub.Execute(_held_open(commands))
        tokens, reasons = 0, []
        for event in call:
            if event.WhichOneof("event") == "step":
                if tokens == 0:
                    process.send_signal(signal.SIGTERM)
                tokens += len(event.step.token_ids)
            elif event.WhichOneof("event") == "finished":
                reasons.append(event.finished.reason)
        assert (tokens, len(reasons)) == (509, 1)
    assert process.wait(60) == 0


def test_a_rank_that_dies_in_mid_stream_ends_the_executor(start: Start, tiny_base: Path) -> None:
    """UNAVAILABLE for its streams, exit code 1, and no process is left."""
    several = ("--tensor-parallel-size", "2", "--torch-threads", "1", "--metrics-port", "-1")
    process = start("--model", str(tiny_base), "--listen", "127.0.0.1:0", *several)
    port = log_until(process, r"listening on .*:(\d+)").group(1)
    log_until(process, "ready")
    ranks = rank_processes(process.pid)
    assert len(ranks) == 1
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Execute(_held_open([endless("a")]))
        next(event for event in call if event.WhichOneof("event") == "step")
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as error:
            for _ in call:
                pass
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert process.wait(60) == 1
    log = process.stderr.read() if process.stderr else ""
    assert "a rank has ended" in log


def test_ranks_end_with_a_killed_executor(start: Start, tiny_base: Path) -> None:
    several = ("--tensor-parallel-size", "2", "--torch-threads", "1", "--metrics-port", "-1")
    process = start("--model", str(tiny_base), "--listen", "127.0.0.1:0", *several)
    log_until(process, "ready")
    (rank,) = rank_processes(process.pid)
    process.kill()
    wait_until(lambda: not is_running(rank), "the rank ends")


def rank_processes(parent: int) -> list[int]:
    """Not the process that multiprocessing keeps for its own resources, nor what is about to become it."""
    return children(parent, "spawn_main")


def _held_open(commands: list[executor_pb2.ExecutorCommand]) -> Iterator[executor_pb2.ExecutorCommand]:
    """The commands, and then no end: the server closes the stream."""
    yield from commands
    threading.Event().wait(60)


def test_wrong_settings_end_with_one_line_and_code_2(start: Start, tiny_base: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = ("--listen", "127.0.0.1:0", "--metrics-port", "-1")
        cases = {
            "config.json": start("--model", "/nowhere", *free),
            "cannot listen": start("--model", str(tiny_base), *free, "--listen", f"127.0.0.1:{port}"),
            "store url": start("--model", str(tiny_base), "--store", "s3://x", *free),
            "Redis cannot": start("--model", str(tiny_base), "--store", "redis://127.0.0.1:1", *free),
            "--tensor-parallel-size": start("--model", str(tiny_base), "--tensor-parallel-size", "3", *free),
            "--max-model-len": start("--model", str(tiny_base), "--max-model-len", "513", *free),
        }
        for text, process in cases.items():
            _, errors = process.communicate(timeout=240)
            lines = [line for line in errors.splitlines() if line.startswith("executor: ")]
            assert process.returncode == 2, (text, errors)
            assert len(lines) == 1 and text in lines[0]
            assert "Traceback" not in errors
