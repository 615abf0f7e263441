"""The client of the benchmark: it reads all streams, and tells what it saw in a window of time."""

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from lorafleet.doors.options import more_connections
from lorafleet.tls.credentials import channel_credentials
from lorafleet.tls.files import Tls
from lorafleet.v1 import common_pb2, inference_pb2, inference_pb2_grpc

START_PATIENCE_S = 20.0
SETTLE_S = 2.0


@dataclass(slots=True)
class Seen:
    """Seconds are of CLOCK_MONOTONIC. Tokens before the window count as read, but have no entry in `chunks`.

    started_s: of each stream, how long after all were asked for its first token was read.
    chunks: (stream, index of its first token, number of tokens, when it was read).
    busy_s: what the server had of a core within the window.
    """

    started_s: list[float] = field(default_factory=list)
    chunks: list[tuple[int, int, int, float]] = field(default_factory=list)
    window_s: float = 0.0
    busy_s: float = 0.0


def busy_s(pid: int) -> float:
    """Seconds of cores that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read(
    address: str, pid: int, streams: int, tokens: int, window_s: float, tls: Tls | None = None
) -> Seen:
    """Asks for all streams at once and reads them, waits until all have begun and some time more, and takes
    down what comes within the window."""
    seen, recording = Seen(), asyncio.Event()
    async with _channel(address, tls) as channel:
        await channel.channel_ready()
        stub, asked = inference_pb2_grpc.InferenceStub(channel), time.monotonic()
        readers = [
            asyncio.create_task(_read_one(stub, number, tokens, asked, seen, recording))
            for number in range(streams)
        ]
        while len(seen.started_s) < streams and time.monotonic() - asked < START_PATIENCE_S:
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        start, busy = time.monotonic(), busy_s(pid)
        recording.set()
        await asyncio.sleep(window_s)
        recording.clear()
        seen.window_s, seen.busy_s = time.monotonic() - start, busy_s(pid) - busy
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return seen


def _channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    options = [("grpc.http2.bdp_probe", 0), *more_connections(32)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


async def _read_one(
    stub: inference_pb2_grpc.InferenceStub,
    number: int,
    tokens: int,
    asked: float,
    seen: Seen,
    recording: asyncio.Event,
) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[35, 36, 37]),
        sampling=common_pb2.Sampling(seed=number),
        stopping=common_pb2.Stopping(max_new_tokens=tokens, ignore_eos=True),
    )
    begun = False
    async for chunk in stub.GenerateStream(request):
        now = time.monotonic()
        if not begun:
            begun = True
            seen.started_s.append(now - asked)
        if recording.is_set():
            seen.chunks.append((number, chunk.output_index, len(chunk.token_ids), now))
