"""Streams whose clients are deaf or slow, and chunks that gather tokens."""

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest

from lorafleet.calls import CHANNEL_OPTIONS
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from scheduler.stream_writer import WRITING
from tests.support.services.proxy import Proxy
from tests.support.services.scheduler_house import House, generate, open_house, pad, read
from tests.support.services.scheduling import until

DEAF = 50


def objects() -> Counter[str]:
    """How many there are of each type."""
    gc.collect()
    return Counter(type(each).__qualname__ for each in gc.get_objects())


def writers() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == WRITING]


@pytest.mark.parametrize("max_new_tokens", [12, 120])
async def test_deaf_clients_are_cut_off_on_time(model: Path, max_new_tokens: int) -> None:
    """Whether their answer is complete by then or not; who reads beside them gets all of it."""
    async with open_house(model, slow_client_timeout=0.3) as house:
        house.fake.step_s = 0.002
        house.fake.edit_step = lambda step: pad(step, 10_000)  # a window of 64 KiB is full after a few tokens
        response = inference_pb2.ResponseOptions(logprobs=20)
        ask = generate(max_new_tokens=max_new_tokens, response=response)
        async with grpc.aio.insecure_channel(house.scheduler.address, options=CHANNEL_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            deaf = [stub.GenerateStream(ask) for _ in range(DEAF)]
            await until(lambda: len(writers()) == DEAF)
            await until(lambda: not writers() and not house.scheduler.dispatcher.num_live)
            chunks = await read(house.inference.GenerateStream(ask))
            assert sum(len(chunk.token_ids) for chunk in chunks) == max_new_tokens
            for call in deaf:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read(call)
                assert caught.value.code() is grpc.StatusCode.CANCELLED
                assert "reads too slowly" in (caught.value.details() or "")


async def test_requests_that_were_cancelled_while_they_waited_leave_no_object(house: House) -> None:
    """`make leavers` looks at the memory of 50,000 of them, and of clients that leave in other ways."""
    house.fake.frozen = True

    async def cancel_some(count: int) -> None:
        calls = [house.inference.GenerateStream(generate()) for _ in range(count)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        for call in calls:
            call.cancel()
        await until(lambda: not house.scheduler.dispatcher.num_live and not writers())
        del house.fake.dispatches[:], house.fake.commands[:], house.fake.cancelled[:]

    await cancel_some(200)
    before = objects()
    await cancel_some(200)
    await until(lambda: max((objects() - before).values(), default=0) < 200)  # not one each


async def test_a_stream_that_is_cancelled_in_a_pause_leaves_nothing(model: Path) -> None:
    """At once, not when the pause would have ended."""
    async with open_house(model, stream_interval_ms=3_600_000) as house:
        house.fake.step_s = 0.01
        call = house.inference.GenerateStream(generate(max_new_tokens=1000))
        assert (await call.read()).token_ids
        await until(lambda: objects()["Outbox"] == 1)
        call.cancel()
        await until(lambda: not house.scheduler.dispatcher.num_live and not writers())
        await until(lambda: not objects()["Outbox"])


async def test_chunks_gather_the_tokens_of_an_interval(model: Path) -> None:
    """The first token and the end are not among those that wait."""
    async with open_house(model, stream_interval_ms=100) as house:
        chunks = await read(house.inference.GenerateStream(generate(max_new_tokens=60)))
        tokens = [len(chunk.token_ids) for chunk in chunks]
        assert sum(tokens) == 60 and tokens[0] == 1 and chunks[-1].finish_reason
        assert max(tokens) > 5


async def test_a_drain_waits_for_clients_that_have_not_read_all_yet(model: Path) -> None:
    """Their answers are complete: nothing of the requests lives but what is to be sent."""
    async with open_house(model) as house:
        house.fake.edit_step = lambda step: pad(step, 10_000)
        ask = generate(max_new_tokens=60, response=inference_pb2.ResponseOptions(logprobs=20))
        async with grpc.aio.insecure_channel(house.scheduler.address, options=CHANNEL_OPTIONS) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(ask)
            await until(lambda: bool(writers()))
            await until(lambda: not house.scheduler.dispatcher.num_live)
            drained = asyncio.create_task(house.scheduler.drain())
            await asyncio.sleep(0.05)
            assert not drained.done()
            chunks = await read(call)
            assert sum(len(chunk.token_ids) for chunk in chunks) == 60
            assert await drained


async def test_a_drain_waits_for_answers_that_are_asked_for_whole(model: Path) -> None:
    """Their handlers are over: gRPC has what the connection does not take yet."""
    passes = threading.Event()
    passes.set()

    def delay(size: int) -> float:
        passes.wait()
        return 0.0

    async with open_house(model) as house:
        house.fake.edit_step = lambda step: pad(step, 10_000)
        ask = generate(max_new_tokens=60, response=inference_pb2.ResponseOptions(logprobs=20))
        port = int(house.scheduler.address.rpartition(":")[2])
        with Proxy(port, delay) as proxy:
            address = f"127.0.0.1:{proxy.port}"
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                await channel.channel_ready()
                passes.clear()
                call = inference_pb2_grpc.InferenceStub(channel).Generate(ask)
                await until(lambda: bool(house.scheduler.dispatcher.num_live))
                await until(lambda: not house.scheduler.dispatcher.num_live)
                drained = asyncio.create_task(house.scheduler.drain())
                await asyncio.sleep(0.05)
                assert not drained.done()
                passes.set()
                assert len((await call).token_ids) == 60
                assert await drained
