"""A client whose machine loses its power says no goodbye: its calls end all the same, and nothing is left."""

import asyncio
from pathlib import Path

import grpc
import pytest

from lorafleet.v1 import inference_pb2_grpc
from tests.support.services.proxy import Proxy
from tests.support.services.scheduler_house import generate, open_house
from tests.support.services.scheduling import until

KEEPALIVE_S = 0.6
PINGS_IN_SILENCE = 3  # Each of them is answered.


@pytest.mark.parametrize("silent", [True, False])
async def test_the_calls_of_a_client_that_vanished_end(model: Path, silent: bool) -> None:
    """Of one that waits in silence, however long, and of one with a stream of tokens on its way."""
    async with open_house(model, keepalive_time=KEEPALIVE_S) as house:
        house.fake.frozen = silent
        port = int(house.scheduler.address.rpartition(":")[2])
        with Proxy(port) as proxy:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                call = stub.GenerateStream(generate(max_new_tokens=4000))
                whole = stub.Generate(generate(max_new_tokens=4000))
                whole.add_done_callback(lambda _: None)
                await until(lambda: len(house.fake.running) == 2)
                if silent:
                    await asyncio.sleep(PINGS_IN_SILENCE * KEEPALIVE_S)
                else:
                    await call.read()
                assert house.scheduler.dispatcher.num_live == 2
                proxy.swallow()
            await until(lambda: not house.fake.running, 10.0)
            assert not house.scheduler.dispatcher.num_live
            [state] = house.scheduler.dispatcher.fleet.states
            await until(lambda: state.free_seats == house.fake.hello.max_seats)
