"""Health of a service behind a real server, and those who watch it: strangers, of whom some do not read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from lorafleet.doors import Health, paths
from tests.support.flood import http2

Response = health_pb2.HealthCheckResponse
ASKED = HealthCheckRequest(service="a")


@asynccontextmanager
async def served(health: Health) -> AsyncIterator[tuple[str, health_pb2_grpc.HealthStub]]:
    """Its address, and a stub to it."""
    server = paths.make_server(())
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield address, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(None)


async def statuses(call: grpc.aio.UnaryStreamCall, *wanted: int) -> None:
    for each in wanted:
        assert (await asyncio.wait_for(call.read(), 20)).status == each


async def test_a_watcher_that_does_not_read_keeps_nothing_from_others() -> None:
    health = Health()
    async with served(health) as (address, stub):
        connection = await asyncio.to_thread(http2.Connection, address, reads=False)
        stream, head = connection.call("/grpc.health.v1.Health/Watch")
        connection.send([head, http2.message(stream, ASKED.SerializeToString())])
        while not health.num_watchers:
            await asyncio.sleep(0.01)
        watch = stub.Watch(ASKED)
        await statuses(watch, Response.SERVICE_UNKNOWN)
        for status in (Response.SERVING, Response.NOT_SERVING):
            health.set("a", status)
            await statuses(watch, status)
            assert (await stub.Check(ASKED)).status == status
        connection.close()


async def test_all_who_watch_are_told_whoever_else_has_left() -> None:
    health = Health()
    health.set("a", Response.SERVING)
    async with served(health) as (_, stub):
        first, second = stub.Watch(ASKED), stub.Watch(ASKED)
        await statuses(first, Response.SERVING)
        await statuses(second, Response.SERVING)
        first.cancel()
        while health.num_watchers > 1:
            await asyncio.sleep(0.01)
        health.set("", Response.NOT_SERVING)
        health.set("a", Response.SERVING)
        health.set("a", Response.NOT_SERVING)
        await statuses(second, Response.NOT_SERVING)


async def test_the_first_watcher_gives_way_when_there_are_too_many() -> None:
    async with served(Health(max_watchers=2)) as (_, stub):
        calls = []
        for _ in range(3):  # One after the other: gRPC takes those that come together in any order.
            calls.append(stub.Watch(HealthCheckRequest()))
            await statuses(calls[-1], Response.SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls[0].read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(ASKED)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
