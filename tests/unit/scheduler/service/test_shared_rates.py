"""Two real schedulers over a real Redis: one tenant's rate is one, whoever is asked."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from tests.support.services.failures import failure_of
from tests.support.services.scheduler_house import House, generate, open_house
from tests.support.services.scheduling import until
from tests.support.stores.redis_server import RedisServer

RATE, BURST = 0.2, 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
async def houses(model: Path, server: RedisServer, tmp_path: Path) -> AsyncIterator[list[House]]:
    file = tmp_path / "tenants.toml"
    file.write_text(f"[default]\nrequests_per_minute = {60 * RATE}\nburst_seconds = {BURST / RATE}\n")
    async with AsyncExitStack() as stack:
        opening = [open_house(model, store=server.url, tenants_file=file) for _ in range(2)]
        yield [await stack.enter_async_context(house) for house in opening]


async def accepted(house: House) -> bool:
    try:
        await house.inference.Generate(generate(max_new_tokens=1))
    except grpc.aio.AioRpcError as error:
        assert failure_of(error).reason == "REQUEST_RATE"
        return False
    return True


def count(house: House) -> int:
    return house.scheduler._sharing._count


async def test_two_schedulers_give_one_rate_with_redis_and_without(
    houses: list[House], server: RedisServer
) -> None:
    began, taken = time.monotonic(), 0
    await until(lambda: [count(house) for house in houses] == [2, 2])
    for _ in range(20):
        for house in houses:
            taken += await accepted(house)
    # One burst, what came in since then, and one request that each may have begun.
    assert BURST - 2 <= taken <= BURST + RATE * (time.monotonic() - began) + 2
    busy, idle = (house.scheduler._sharing for house in houses)
    for _ in range(40):  # At one of them alone: its part grows, the other's gets small.
        taken += await accepted(houses[0])
    await until(lambda: busy.share("default", time.monotonic()) > 0.6)
    await until(lambda: idle.share("default", time.monotonic()) < 0.4)
    server.kill()
    await until(lambda: busy.share("default", time.monotonic()) == 0.5)
    for _ in range(10):
        for house in houses:
            taken += await accepted(house)
    assert taken <= BURST + RATE * (time.monotonic() - began) + 2
    server.start()
    await until(lambda: busy.share("default", time.monotonic()) > 0.5)
