"""An executor on a real socket in this process, and a scheduler's end of its streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from adapter_store import WeightsSource
from executor.app import ExecutorApp
from executor.build import build_engine
from executor.config import ExecutorConfig
from lorafleet.v1 import executor_pb2, executor_pb2_grpc
from tests.support.engines.driver import SMALL


class Scheduler:
    """One Execute stream, seen from the other end."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        stub = executor_pb2_grpc.ExecutorStub(channel)  # type: ignore[no-untyped-call]
        self.call = stub.Execute(metadata=metadata)
        self.events: list[executor_pb2.ExecutorEvent] = []
        self.tokens: dict[str, list[int]] = {}
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (event := await self.call.read()) is not grpc.aio.EOF:
            self.events.append(event)
            step, start = event.step, 0
            for name, first, count in zip(
                step.dispatch_ids, step.first_output_index, step.token_counts, strict=True
            ):
                tokens = self.tokens.setdefault(name, [])
                assert first == len(tokens)
                tokens += step.token_ids[start : start + count]
                start += count

    async def send(self, **command: Any) -> None:
        await self.call.write(executor_pb2.ExecutorCommand(**command))

    async def dispatch(self, *dispatches: executor_pb2.Dispatch) -> None:
        await self.send(dispatch=executor_pb2.DispatchBatch(dispatches=dispatches))

    def of(self, kind: str) -> list[Any]:
        return [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not done():
                await asyncio.sleep(0.005)

    async def ended(self, *names: str) -> None:
        await self.until(
            lambda: {e.dispatch_id for e in [*self.of("finished"), *self.of("rejected")]} >= set(names)
        )


def dispatch(name: str, *, tokens: int = 8, digest: str = "", **fields: Any) -> executor_pb2.Dispatch:
    message = executor_pb2.Dispatch(
        dispatch_id=name, request_id=f"r-{name}", digest=digest, prompt_token_ids=range(3, 20), **fields
    )
    message.stopping.max_new_tokens = tokens
    message.stopping.ignore_eos = True
    return message


@contextlib.asynccontextmanager
async def running(base: Path, adapters: WeightsSource, **settings: Any) -> AsyncIterator[ExecutorApp]:
    settings = SMALL | {"listen": "127.0.0.1:0", "metrics_port": 0} | settings
    async with ExecutorApp(ExecutorConfig(model=str(base), **settings), adapters, build_engine) as app:
        await asyncio.wait_for(app.ready.wait(), 60)
        yield app


@contextlib.asynccontextmanager
async def connected(app: ExecutorApp, *metadata: tuple[str, str], port: int = 0) -> AsyncIterator[Scheduler]:
    """`port`: of a proxy, if there is one."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port or app.port}") as channel:
        scheduler = Scheduler(channel, metadata)
        try:
            await scheduler.until(lambda: scheduler.of("load"))
            yield scheduler
        finally:
            scheduler.call.cancel()
            scheduler.reader.cancel()


async def idle(app: ExecutorApp) -> None:
    """Everything is free, as the engine itself says."""
    async with asyncio.timeout(60):
        while True:
            snapshot = app.hub.snapshot()
            assert snapshot is not None
            status = snapshot.status
            if (status.free_seats, status.free_kv_blocks, status.free_slots) == (16, 64, 2):
                return
            await asyncio.sleep(0.005)
