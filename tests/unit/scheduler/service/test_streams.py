"""Streams whose clients are deaf or slow, and chunks that gather tokens."""

import asyncio
from pathlib import Path

import grpc
import pytest

from lorafleet.calls import CHANNEL_OPTIONS
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from scheduler.stream_writer import WRITING
from tests.support.services.scheduler_house import generate, open_house, pad, read
from tests.support.services.scheduling import until

DEAF = 50


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
