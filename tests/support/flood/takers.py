"""What a tenant may ask for and take all of: `flooders.py` runs each way as a process of its own."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from lorafleet.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from tests.support.flood import http2

BOMB = "hostile/bomb"
# Pushed, it is tried on fewer messages.
BOMB_TEMPLATE = (
    "{{ messages[0].content }}{% if messages | length > 6 %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
BOMBERS, DRIPPERS, WATCHERS, READERS = 40, 40, 300, 200
AGAIN_S = 1.0
UNREAD_S = 13.0  # A client that reads nothing is given up before.
STREAM = "/lorafleet.v1.Inference/GenerateStream"


def bombs(address: str, metadata: http2.Metadata) -> None:
    """40 callers of a chat template that burns all time it gets."""
    said = [inference_pb2.ChatMessage(role="user", content="x")] * 7
    request = inference_pb2.TokenizeRequest(adapter=BOMB, chat=inference_pb2.Chat(messages=said))

    async def call(channel: grpc.aio.Channel) -> None:
        await inference_pb2_grpc.InferenceStub(channel).Tokenize(request, metadata=metadata)

    _for_ever(address, BOMBERS, call)


def drips(address: str, metadata: http2.Metadata) -> None:
    """40 callers whose pushes bring a byte every five seconds."""

    async def parts() -> AsyncIterator[adapters_pb2.PushRequest]:
        yield adapters_pb2.PushRequest(header=adapters_pb2.PushHeader(adapter="drip"))
        while True:
            yield adapters_pb2.PushRequest(chunk=adapters_pb2.FileChunk(name="README.md", data=b"x"))
            await asyncio.sleep(5)

    async def call(channel: grpc.aio.Channel) -> None:
        await adapters_pb2_grpc.AdaptersStub(channel).Push(parts(), metadata=metadata)

    _for_ever(address, DRIPPERS, call)


def watches(address: str, metadata: http2.Metadata) -> None:
    """300 watchers of the fleet, who ask for a picture every millisecond."""

    async def call(channel: grpc.aio.Channel) -> None:
        request = fleet_pb2.WatchFleetRequest(interval_ms=1)
        async for _ in fleet_pb2_grpc.FleetStub(channel).Watch(request, metadata=metadata):
            pass

    _for_ever(address, WATCHERS, call)


def unread(address: str, metadata: http2.Metadata) -> None:
    """200 long answers, of which no byte is read."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), stopping=common_pb2.Stopping(max_new_tokens=4000)
    )
    body = request.SerializeToString()
    while True:
        connections = [http2.Connection(address, reads=False) for _ in range(READERS // 50)]
        for connection in connections:
            for _ in range(50):
                stream, head = connection.call(STREAM, metadata)
                connection.send([head, http2.message(stream, body)])
        time.sleep(UNREAD_S)
        for connection in connections:
            connection.close()


def _for_ever(address: str, callers: int, call: Any) -> NoReturn:
    """So many callers at once, each on its own; who is refused comes again after about what it was told."""

    async def caller(channel: grpc.aio.Channel) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await call(channel)
            await asyncio.sleep(AGAIN_S)

    async def run() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(1 + callers // 50)]
        await asyncio.gather(*(caller(channels[number % len(channels)]) for number in range(callers)))

    asyncio.run(run())
    raise AssertionError("it ended")
