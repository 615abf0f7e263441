"""A whole scheduler, started in this process, with one client channel and a fake executor."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from adapter_store import ModelSpec
from lorafleet.doors.options import more_connections
from lorafleet.v1 import (
    common_pb2,
    executor_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from scheduler.app import Scheduler
from scheduler.config import Config
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import until


@dataclass
class House:
    """A running scheduler with one client channel and its fake executor."""

    scheduler: Scheduler
    fake: FakeExecutor
    channel: grpc.aio.Channel

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def fleet(self) -> fleet_pb2_grpc.FleetStub:
        return fleet_pb2_grpc.FleetStub(self.channel)

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@asynccontextmanager
async def open_house(
    model: Path, *, before_start: Callable[[Scheduler], None] = lambda scheduler: None, **changes: Any
) -> AsyncIterator[House]:
    """Over the store beside the model; `changes` of its settings."""
    fake = FakeExecutor(ModelSpec.from_folder(model).fingerprint)
    await fake.start()
    config = Config(
        model=model,
        store=str(model.parent / "store"),
        executor=(fake.address,),
        listen="127.0.0.1:0",
        metrics_port=-1,
    )
    scheduler = Scheduler(replace(config, **changes))
    before_start(scheduler)
    await scheduler.start()
    try:
        async with grpc.aio.insecure_channel(scheduler.address, options=more_connections(32)) as channel:
            await until(lambda: scheduler.dispatcher.fleet.any_ready)
            yield House(scheduler, fake, channel)
            scheduler.dispatcher.check()
    finally:
        await scheduler.stop()
        await fake.stop()


def generate(
    text: str = "The quick", *, max_new_tokens: int = 12, **fields: object
) -> inference_pb2.GenerateRequest:
    stopping = common_pb2.Stopping(max_new_tokens=max_new_tokens)
    return inference_pb2.GenerateRequest(text=text, stopping=stopping, **fields)


async def read(stream: AsyncIterator[inference_pb2.GenerateChunk]) -> list[inference_pb2.GenerateChunk]:
    return [chunk async for chunk in stream]


async def fails(call: object) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and message of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    return caught.value.code(), info.reason, caught.value.details() or ""


def pad(step: executor_pb2.StepTokens, num_bytes: int) -> None:
    """More log-probabilities than an executor would send."""
    top = [common_pb2.TokenLogprob(token_id=1 << 30, logprob=-1)]
    for dispatch_id in step.dispatch_ids:
        position = step.logprobs.add(dispatch_id=dispatch_id).positions.add()
        position.top.extend(top * (num_bytes // (top[0].ByteSize() + 2) + 1))
