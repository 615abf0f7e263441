"""`python -m scheduler` as a process of its own."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import grpc
import pytest

from adapter_store import ModelSpec
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.adapters.served_model import write_model
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import until
from tests.unit.scheduler.test_poller import may_choose


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("served")) / "base")


async def start(*flags: str, **environment: str) -> asyncio.subprocess.Process:
    pipe, environ = asyncio.subprocess.PIPE, {**os.environ, **environment}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler", *flags, stdout=pipe, stderr=pipe, limit=1 << 20, env=environ
    )


async def output_of(*flags: str) -> tuple[int | None, str]:
    """Exit status and stderr of a process that ends by itself."""
    process = await start(*flags)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


def policies(pid: int) -> list[int]:
    """How Linux schedules each thread of a process."""
    return [os.sched_getscheduler(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


async def test_what_keeps_it_from_starting_is_one_line(model: Path, tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store"), "--executor", "127.0.0.1:1", "--metrics-port", "-1"]
    status, errors = await output_of("--model", str(tmp_path / "missing"), *store)
    assert (status, len(errors.splitlines())) == (2, 1)
    assert errors.startswith("scheduler: ")
    flag = f"file:{tmp_path / 'no-fleet'}"
    status, errors = await output_of("--model", str(model), *store, "--executor", flag)
    assert (status, errors) == (2, f"scheduler: executor: {flag}: No such file or directory\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, errors = await output_of("--model", str(model), *store, "--listen", address)
    assert (status, errors) == (2, f"scheduler: cannot listen on {address}: Address already in use\n")


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_sigterm_drains_and_exits_with_0(model: Path, tmp_path: Path, event_loop: str) -> None:
    """A rollout cuts no request that runs, on either event loop."""
    hidden = tmp_path / "hidden"
    if event_loop == "uvloop":
        pytest.importorskip("uvloop")
    else:
        hidden.mkdir()
        (hidden / "uvloop.py").write_text("raise ImportError\n")
    fake = FakeExecutor(ModelSpec.from_folder(model).fingerprint, step_s=0.02)
    await fake.start()
    flags = ["--model", str(model), "--store", str(tmp_path / "store"), "--executor", fake.address]
    flags += ["--listen", "127.0.0.1:0", "--metrics-port", "-1", "--log-format", "json"]
    process = await start(*flags, PYTHONPATH=os.pathsep.join([str(hidden), *sys.path]))
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while "address" not in (entry := json.loads(await process.stderr.readline())):
            pass
        while not (message := json.loads(await process.stderr.readline())["message"]).startswith("event"):
            pass
    assert message == f"event loop: {event_loop}"
    async with grpc.aio.insecure_channel(entry["address"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="a", stopping=common_pb2.Stopping(max_new_tokens=40))
        answers = [asyncio.ensure_future(stub.Generate(request)) for _ in range(3)]
        await until(lambda: len(fake.running) == 3)
        gathering = policies(process.pid).count(os.SCHED_BATCH)
        assert gathering == may_choose(), "gRPC's thread takes the loop's core"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while True:
                try:
                    await stub.Generate(request)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    break
            assert [(await answer).usage.completion_tokens for answer in answers] == [40] * 3
            assert await process.wait() == 0
    await fake.stop()
