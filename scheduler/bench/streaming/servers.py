"""The processes of a measurement: scheduler, executors (all in one), and the bare server."""

import asyncio
import contextlib
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from lorafleet.doors.options import MAX_CONNECTIONS, MAX_STREAMS
from lorafleet.ports import free_port
from lorafleet.tls.credentials import add_port
from lorafleet.tls.files import Tls, WatchedFiles
from lorafleet.v1 import executor_pb2_grpc, inference_pb2_grpc
from scheduler.bench.streaming.bare import BareServer
from scheduler.bench.streaming.pace import PacedExecutor, Record
from scheduler.event_loop import loop_factory
from scheduler.grpc_options import server_options

HOST = "127.0.0.1"
KEEPALIVE_S = 20.0


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of equal pace over executors of equal size. asked: tokens a second, all together."""

    streams: int
    executors: int
    asked: int
    window_s: float

    @property
    def step_s(self) -> float:
        return self.streams / self.asked

    @property
    def seats(self) -> int:
        return -(-self.streams // self.executors)


Finish = Callable[[], Record]


@contextlib.contextmanager
def executors(fingerprint: str, load: Load, tls: Tls | None = None) -> Iterator[tuple[list[str], Finish]]:
    """Addresses of executors in one process, and what ends it. In clear without `tls`."""
    with contextlib.ExitStack() as stack:
        ports = [free_port(stack, HOST) for _ in range(load.executors)]
        with _child(_serve_executors, ports, fingerprint, load, tls) as (_, finish):
            yield [f"{HOST}:{port}" for port in ports], finish


@contextlib.contextmanager
def bare(load: Load) -> Iterator[tuple[str, int, Finish]]:
    """Address and process id of the bare server, and what ends it."""
    with contextlib.ExitStack() as stack:
        port = free_port(stack, HOST)
        with _child(_serve_bare, port, load) as (pid, finish):
            yield f"{HOST}:{port}", pid, finish


@contextlib.contextmanager
def scheduler(model: Path, addresses: list[str], max_queued: int, *flags: str) -> Iterator[tuple[str, int]]:
    """Address and process id of one that knows executors at these addresses."""
    with contextlib.ExitStack() as stack:
        address = f"{HOST}:{free_port(stack, HOST)}"
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="lorafleet-bench-"))
        command = [sys.executable, "-m", "scheduler", "--log-level", "error", *flags]
        command += ["--model", str(model), "--store", store, "--listen", address]
        command += [word for executor in addresses for word in ("--executor", executor)]
        command += ["--max-queued", str(max_queued), "--max-queued-per-tenant", str(max_queued)]
        command += [] if "--metrics-port" in flags else ["--metrics-port", "-1"]
        process = subprocess.Popen(command)
        try:
            _wait_until_it_listens(address)
            time.sleep(1.0)  # executors are known and have reported
            yield address, process.pid
        finally:
            process.kill()
            process.wait()


def _wait_until_it_listens(address: str) -> None:
    """Whatever it speaks. Raises TimeoutError."""
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no scheduler listens on {address}")


Serve = Callable[..., Coroutine[Any, Any, None]]


@contextlib.contextmanager
def _child(serve: Serve, *args: Any) -> Iterator[tuple[int, Finish]]:
    """A process that serves until it is asked for its record."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run, args=(serve, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    try:
        yield process.pid or 0, lambda: _ask(ours)
    finally:
        process.kill()
        process.join()


def _ask(connection: Connection) -> Record:
    connection.send(None)
    record: Record = connection.recv()
    return record


def _run(serve: Serve, connection: Connection, *args: Any) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(connection, *args))


async def _serve_executors(
    connection: Connection, ports: list[int], fingerprint: str, load: Load, tls: Tls | None
) -> None:
    record = Record([[] for _ in ports])
    held = list[object]()  # a server that nobody holds ends
    for number, port in enumerate(ports):
        executor = PacedExecutor(number, fingerprint, load.seats, record)
        server = grpc.aio.server()
        executor_pb2_grpc.add_ExecutorServicer_to_server(executor, server)
        add_port(server, f"{HOST}:{port}", WatchedFiles(tls) if tls else None)
        await server.start()
        held += [server, asyncio.create_task(executor.run(load.step_s))]
    await _until_asked(connection, record, held)


async def _serve_bare(connection: Connection, port: int, load: Load) -> None:
    record = Record([[] for _ in range(load.executors)])
    options = server_options(KEEPALIVE_S, MAX_STREAMS, MAX_CONNECTIONS)  # The scheduler's.
    service, server = BareServer(load.step_s, record), grpc.aio.server(options=options)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    held = [asyncio.create_task(service.run(group)) for group in range(load.executors)]
    await _until_asked(connection, record, held)


async def _until_asked(connection: Connection, record: Record, held: object) -> None:
    connection.send(None)
    await asyncio.to_thread(connection.recv)
    connection.send(record)
    await asyncio.sleep(60)  # `held` lives on until it is killed
