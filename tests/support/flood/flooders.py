"""One hostile client as a process of its own: `python -m tests.support.flood.flooders WAY ADDRESS [TOKEN]`.

It runs niced, on one core, until it is killed. Without a token it is anonymous.
"""

import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import grpc

from tests.support.flood import http2, takers

GENERATE = "/lorafleet.v1.Inference/GenerateStream"
TOKENIZE = "/lorafleet.v1.Inference/Tokenize"
HEALTH = "/grpc.health.v1.Health/Check"
EXECUTE = "/lorafleet.v1.Executor/Execute"
HUGE_BYTES = 11 << 20
CONNECTIONS = 24
NICE = 15

Flood = Callable[[str, http2.Metadata], None]


def huge(address: str, metadata: http2.Metadata) -> None:
    """Bodies of 11 MiB, over and over, on 24 connections."""
    # GenerateRequest.token_ids.ids, packed: a byte each on the wire, four parsed, and many more as Python's.
    ids = b"\x0a" + _varint(HUGE_BYTES) + bytes(HUGE_BYTES)
    body = b"\x22" + _varint(len(ids)) + ids
    _calls(address, metadata, [GENERATE, GENERATE, TOKENIZE, HEALTH], lambda: body)


def padded(address: str, metadata: http2.Metadata) -> None:
    """Requests that are accepted, on 24 connections, with three tokens and 11 MiB of what no field knows."""
    prompt, padding = b"\x0a\x03\x05\x06\x07", _varint(HUGE_BYTES) + bytes(HUGE_BYTES)
    stopping = b"\x3a\x03\x08" + _varint(500)
    body = b"\x22" + _varint(len(prompt)) + prompt + stopping + b"\xfa\x3f" + padding
    _calls(address, metadata, [GENERATE], lambda: body)


def malformed(address: str, metadata: http2.Metadata) -> None:
    """Bytes that are no message: noise, and a string that is no UTF-8."""
    draw = random.Random(1)
    bodies = [draw.randbytes(size) for size in (1, 7, 300, 5000)] + [b"\x0a\x02\xff\xfe"]
    _calls(address, metadata, [TOKENIZE, GENERATE, HEALTH, EXECUTE], lambda: draw.choice(bodies))


def slow(address: str, metadata: http2.Metadata) -> None:
    """Bodies that never end: 24 connections, 50 calls on each, a byte now and then."""
    connections = [http2.Connection(address) for _ in range(CONNECTIONS)]
    open_streams = []
    for connection in connections:
        for number in range(50):
            stream, head = connection.call((GENERATE, TOKENIZE, HEALTH)[number % 3], metadata)
            connection.send([head, http2.message(stream, b"\x0a", announced=HUGE_BYTES, end=False)])
            open_streams.append((connection, stream))
    while True:
        time.sleep(0.5)
        for connection, stream in open_streams:
            with suppress(OSError):
                connection.send([http2.message(stream, b"", announced=1, end=False)[:9] + bytes(5)])


def resets(address: str, metadata: http2.Metadata) -> None:
    """Calls that are reset as soon as they are made, as fast as one connection takes them."""
    connection = http2.Connection(address)
    while True:
        frames = []
        for _ in range(200):
            stream, head = connection.call(GENERATE, metadata)
            frames += [head, http2.reset(stream)]
        try:
            connection.send(frames)
        except OSError:
            time.sleep(0.01)
            connection = _again(address)


def streams(address: str, metadata: http2.Metadata) -> None:
    """24 connections that open calls and leave them open, whatever number is allowed."""
    while True:
        connections = [_again(address) for _ in range(CONNECTIONS)]
        with suppress(OSError):
            for _ in range(50):
                for connection in connections:
                    connection.send(connection.call(GENERATE, metadata)[1] for _ in range(20))
                time.sleep(0.02)
        for connection in connections:
            connection.close()


def connections(address: str, metadata: http2.Metadata) -> None:
    """1,500 connections that say nothing, and new ones for those that are closed."""
    host, _, port = address.rpartition(":")
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            held.append(socket.create_connection((host, int(port)), timeout=1))
        if len(held) > 1500:
            held.pop(0).close()
            time.sleep(0.005)


WAYS: dict[str, Flood] = {
    "huge": huge,
    "malformed": malformed,
    "slow": slow,
    "resets": resets,
    "streams": streams,
    "connections": connections,
}
# Of a tenant, who has a token.
TENANTS_WAYS: dict[str, Flood] = {"huge": huge, "padded": padded}
TAKERS: dict[str, Flood] = {
    "bombs": takers.bombs,
    "drips": takers.drips,
    "watches": takers.watches,
    "unread": takers.unread,
}


def _calls(address: str, metadata: http2.Metadata, methods: list[str], body: Callable[[], bytes]) -> NoReturn:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    options += [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
    channels = [grpc.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
    while True:
        pending = [
            channel.stream_stream(methods[number % len(methods)])(
                iter([body()]), metadata=metadata, timeout=20, wait_for_ready=True
            )
            for number, channel in enumerate(channels)
        ]
        for call in pending:
            with suppress(grpc.RpcError):
                for _ in call:
                    pass


def _again(address: str) -> http2.Connection:
    while True:
        try:
            return http2.Connection(address)
        except OSError:
            time.sleep(0.05)


def _varint(number: int) -> bytes:
    out = b""
    while number >= 128:
        out += bytes([number % 128 + 128])
        number //= 128
    return out + bytes([number])


def main() -> None:
    way, address, *token = sys.argv[1:]
    os.nice(NICE)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    {**WAYS, **TENANTS_WAYS, **TAKERS}[way](
        address, [("authorization", f"Bearer {token[0]}")] if token else []
    )


if __name__ == "__main__":
    main()
