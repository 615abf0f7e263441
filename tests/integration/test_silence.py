"""A client that pings all the time is never cut off, in a call that says nothing or without a call."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.support.services.cluster import PATIENCE_S, Pair

# As often as gRPC lets a client: our own ping every ten seconds.
PINGS = [
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
READY = grpc.ChannelConnectivity.READY


@pytest.fixture(scope="module")
def patience_of_others() -> float:
    """Seconds that a server with gRPC's own settings bears these pings."""

    async def measure() -> float:
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with pinging(f"127.0.0.1:{port}") as channel:
            begin = time.monotonic()
            await asyncio.wait_for(channel.wait_for_state_change(READY), PATIENCE_S)
            seconds = time.monotonic() - begin
        await server.stop(None)
        return seconds

    return asyncio.run(measure())


@asynccontextmanager
async def pinging(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that is connected."""
    async with grpc.aio.insecure_channel(address, options=PINGS) as channel:
        await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
        yield channel


async def test_pings_in_silence_close_nothing(main: Pair, patience_of_others: float) -> None:
    addresses = (main.scheduler.address, main.executor.address)
    await asyncio.gather(
        *(stay_idle(address, 1.5 * patience_of_others) for address in addresses),
        *(hear_nothing(address, 1.5 * patience_of_others) for address in addresses),
    )


async def stay_idle(address: str, seconds: float) -> None:
    async with pinging(address) as channel:
        lost = asyncio.create_task(channel.wait_for_state_change(READY))
        await asyncio.sleep(seconds)
        assert not lost.done()
        lost.cancel()


async def hear_nothing(address: str, seconds: float) -> None:
    """Within a call that has nothing more to say until the service ends."""
    async with pinging(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        silence = asyncio.create_task(call.read())
        await asyncio.sleep(seconds)
        assert not silence.done()
        call.cancel()
