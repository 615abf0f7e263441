"""What is left of clients that leave: `python -m scheduler.bench.leavers --model M --json FILE`."""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from adapter_store import ModelSpec
from lorafleet.bench.metrics import samples, scrape
from lorafleet.bench.results import Results, head
from lorafleet.doors.options import more_connections
from lorafleet.ports import free_port
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from scheduler.bench.streaming.servers import HOST, Load, executors, scheduler

AT_A_TIME = 500
LIVE = "lorafleet_scheduler_live_requests"
PATIENCE_S = 60.0


def main() -> None:
    args = _parser().parse_args()
    if args.hold:
        asyncio.run(_hold(args.hold))
        return
    results = Results(args.json, head("python -m scheduler.bench.leavers"))
    for row in _run(args.model, args.rounds, args.calls):
        results.add(row)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench.leavers", description=__doc__)
    parser.add_argument("--model", type=Path, help="any byte-level model's folder")
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--rounds", type=int, default=5, help="of cancelled calls (5)")
    parser.add_argument("--calls", type=int, default=10_000, help="in each round (10,000)")
    parser.add_argument("--hold", help=argparse.SUPPRESS)  # a scheduler's address: be a client that is killed
    return parser


def _run(model: Path, rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    """A row a round, all of one scheduler, whose executor has a single seat: nearly all of them wait."""
    with ExitStack() as stack:
        metrics_port = free_port(stack, HOST)
        load = Load(streams=1, executors=1, asked=1, window_s=0.0)
        addresses, _ = stack.enter_context(executors(ModelSpec.from_folder(model).fingerprint, load))
        flags = "--metrics-port", str(metrics_port)
        address, pid = stack.enter_context(scheduler(model, addresses, 2 * AT_A_TIME, *flags))
        ways = [(name, way) for name, way in _WAYS.items() for _ in range(rounds if name == "cancel" else 1)]
        for name, way in ways:
            asyncio.run(way(address, calls))
            gone_s = _seconds_until_idle(metrics_port)
            yield {"way": name, "calls": calls, "gone_s": gone_s, "rss_mb": _rss_mb(pid)}


@contextlib.asynccontextmanager
async def _calls(address: str) -> AsyncIterator[list[Any]]:
    """Some that are accepted, of one channel."""
    async with grpc.aio.insecure_channel(address, options=more_connections(32)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[35] * 50),
            stopping=common_pb2.Stopping(max_new_tokens=100),
        )
        calls = [stub.GenerateStream(request) for _ in range(AT_A_TIME)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        yield calls


async def _cancel(address: str, count: int) -> None:
    for _ in range(0, count, AT_A_TIME):
        async with _calls(address) as calls:
            for call in calls:
                call.cancel()


async def _close(address: str, count: int) -> None:
    for _ in range(0, count, AT_A_TIME):
        async with _calls(address):
            """Closing the channel is all."""


async def _kill(address: str, count: int) -> None:
    command = [sys.executable, "-m", "scheduler.bench.leavers", "--hold", address]
    for _ in range(0, count, AT_A_TIME):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout and client.stdout.readline()
            client.kill()


async def _hold(address: str) -> None:
    async with _calls(address):
        sys.stdout.write("accepted\n")
        sys.stdout.flush()
        await asyncio.sleep(PATIENCE_S)


_WAYS = {"cancel": _cancel, "close": _close, "kill": _kill}


def _seconds_until_idle(metrics_port: int) -> float:
    """Until no request is accepted any more; PATIENCE_S when that does not happen."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < PATIENCE_S:
        page = scrape(f"http://{HOST}:{metrics_port}/metrics")
        if any(sample.name == LIVE and not sample.value for sample in samples(page)):
            break
        time.sleep(0.1)
    return round(waited, 1)


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


if __name__ == "__main__":
    main()
