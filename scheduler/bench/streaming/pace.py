"""Who makes tokens in the benchmark: executors that only keep time, and what they write down."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from lorafleet.v1 import executor_pb2, executor_pb2_grpc

REPORT_EVERY_S = 0.5
PLAIN_TOKENS = 64


def token_at(index: int) -> int:
    """Plain letters in the vocabulary of any byte-level model, never an end token."""
    return 35 + index % PLAIN_TOKENS


@dataclass(slots=True)
class Record:
    """When tokens were made, on CLOCK_MONOTONIC: of each executor the times of its steps, and of each stream
    its executor and the step of its first token."""

    steps: list[list[float]]
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)

    def made(self, stream: int, index: int) -> float:
        """When a token of a stream was made."""
        executor, first = self.begun[stream]
        return self.steps[executor][first + index]


async def ticks(number: int, count: int, step_s: float, record: list[float]) -> AsyncIterator[None]:
    """The steps of one executor of `count`, evenly spread among those of the others. None is left out: late
    ones follow at once."""
    due = time.monotonic() + step_s * (1 + number / count)
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        record.append(time.monotonic())
        due += step_s
        yield


class PacedExecutor(executor_pb2_grpc.ExecutorServicer):
    """The wire of a real executor, and a token for every dispatch at each tick. The seed of a dispatch is the
    number of its stream."""

    def __init__(self, number: int, fingerprint: str, seats: int, record: Record) -> None:
        self._number = number
        self._seats = seats
        self._record = record
        self._running: dict[str, int] = {}  # The next output index.
        self._received = 0
        self._outgoing: asyncio.Queue[executor_pb2.ExecutorEvent] = asyncio.Queue()
        self._hello = executor_pb2.Hello(
            protocol_version=1,
            instance_id=f"paced-{number}",
            model_fingerprint=fingerprint,
            max_model_len=1 << 20,
            max_rank=16,
            max_loras=16,
            max_seats=seats,
        )

    async def Execute(
        self, commands: AsyncIterator[executor_pb2.ExecutorCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.ExecutorEvent]:
        """One stream in the life of an executor: the scheduler's."""
        reader = asyncio.create_task(self._read(commands))
        reports = asyncio.create_task(self._report())
        try:
            yield executor_pb2.ExecutorEvent(hello=self._hello)
            while True:
                yield await self._outgoing.get()
        finally:
            reader.cancel()
            reports.cancel()

    async def run(self, step_s: float) -> None:
        """Makes tokens until it is cancelled."""
        steps = self._record.steps[self._number]
        async for _ in ticks(self._number, len(self._record.steps), step_s, steps):
            if self._running:
                self._outgoing.put_nowait(executor_pb2.ExecutorEvent(step=self._step(len(steps))))

    def _step(self, number: int) -> executor_pb2.StepTokens:
        indexes = list(self._running.values())
        step = executor_pb2.StepTokens(
            step=number,
            dispatch_ids=self._running,
            first_output_index=indexes,
            token_counts=[1] * len(indexes),
            token_ids=map(token_at, indexes),
        )
        for dispatch_id in self._running:
            self._running[dispatch_id] += 1
        return step

    async def _read(self, commands: AsyncIterator[executor_pb2.ExecutorCommand]) -> None:
        steps = self._record.steps[self._number]
        async for command in commands:
            for dispatch in command.dispatch.dispatches:
                self._received += 1
                self._running[dispatch.dispatch_id] = 0
                self._record.begun[dispatch.sampling.seed] = self._number, len(steps)
            for dispatch_id in command.cancel.dispatch_ids:
                self._running.pop(dispatch_id, None)

    async def _report(self) -> None:
        while True:
            load = executor_pb2.Load(
                state=executor_pb2.LOAD_STATE_READY,
                free_seats=self._seats - len(self._running),
                free_kv_blocks=1 << 20,
                free_slots=16,
                running=len(self._running),
                received_dispatches=self._received,
            )
            self._outgoing.put_nowait(executor_pb2.ExecutorEvent(load=load))
            await asyncio.sleep(REPORT_EVERY_S)
