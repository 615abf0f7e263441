"""Executors that answer with errors get nothing for a while; what is not their fault closes nobody."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import SchedulerError
from scheduler.fleet.settings import FleetSettings
from scheduler.fleet_service import snapshot
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import (
    SETTINGS,
    admitted,
    dispatcher_of,
    executors,
    expected_tokens,
    read_all,
    ready,
    running,
    tokens_in,
)

DIGEST = "sha256:" + "a" * 64
FAILURES = 3


def saying(reason: str, code: grpc.StatusCode | None = None) -> Callable[[object], executor_pb2.Rejected]:
    """An answer to every dispatch: final with a status, else to be tried again."""
    number = code.value[0] if code else 0
    return lambda dispatch: executor_pb2.Rejected(reason=reason, retryable=code is None, code=number)


@asynccontextmanager
async def pair(tokenizer: Tokenizer) -> AsyncIterator[tuple[Dispatcher, list[FakeExecutor]]]:
    settings = replace(SETTINGS, retry_pause_s=0.001, fleet=FleetSettings(circuit_failures=FAILURES))
    async with executors(2, step_s=0.002) as fakes:
        addresses = [fake.address for fake in fakes]
        async with running(dispatcher_of(addresses, tokenizer, settings)) as dispatcher:
            await ready(dispatcher, 2)
            yield dispatcher, fakes


async def ask(dispatcher: Dispatcher, count: int, digest: str = "") -> list[bool]:
    """One after the other. Whether each had its answer."""
    answered = []
    for number in range(count):
        request = admitted(f"r{number}", digest=digest, max_new_tokens=2)
        try:
            answered.append(
                tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
            )
        except SchedulerError:
            answered.append(False)
    return answered


def tripped(dispatcher: Dispatcher) -> list[bool]:
    return [state.tripped for state in dispatcher.fleet.states]


@pytest.mark.parametrize("reason", ["INTERNAL", "ADAPTER_NOT_FOUND", "STORE_UNAVAILABLE"])
async def test_who_fails_what_others_can_do_is_closed_and_told(tokenizer: Tokenizer, reason: str) -> None:
    codes = {"INTERNAL": grpc.StatusCode.INTERNAL, "ADAPTER_NOT_FOUND": grpc.StatusCode.NOT_FOUND}
    async with pair(tokenizer) as (dispatcher, fakes):
        assert all(await ask(dispatcher, 1, DIGEST))
        bad, good = sorted(
            fakes, key=lambda fake: -len(fake.dispatches)
        )  # The version's home is the bad one.
        position = fakes.index(bad)
        bad.dispatches.clear()
        bad.reject = saying(reason, codes.get(reason))  # type: ignore[assignment]
        answered = await ask(dispatcher, 12, DIGEST)
        assert tripped(dispatcher) == [number == position for number in range(2)]
        assert len(bad.dispatches) == FAILURES
        assert answered.count(False) == (FAILURES if reason == "INTERNAL" else 0)
        seen = snapshot(dispatcher.fleet, dispatcher.queue).executors
        assert {each.address: each.tripped for each in seen} == {bad.address: True, good.address: False}
        assert all(await ask(dispatcher, 5))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("ADAPTER_NOT_FOUND", grpc.StatusCode.NOT_FOUND),
        ("STORE_UNAVAILABLE", None),
        ("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT),
        ("NO_SEATS", None),
    ],
)
async def test_what_all_fail_or_the_request_is_to_blame_for_closes_nobody(
    tokenizer: Tokenizer, reason: str, code: grpc.StatusCode | None
) -> None:
    """A bad adapter, a store that is away, a request without sense, an executor that is full."""
    async with pair(tokenizer) as (dispatcher, fakes):
        for fake in fakes:
            fake.reject = saying(reason, code)  # type: ignore[assignment]
        asking = asyncio.create_task(ask(dispatcher, 8, DIGEST))
        while len(fakes[0].dispatches) + len(fakes[1].dispatches) < 4 * FAILURES and not asking.done():
            await asyncio.sleep(0.005)
        assert tripped(dispatcher) == [False, False]
        for fake in fakes:
            fake.reject = lambda dispatch: None
        await asking
        assert tripped(dispatcher) == [False, False]


async def test_a_half_open_executor_is_judged_by_one_dispatch(tokenizer: Tokenizer) -> None:
    def dispatched(fakes: Sequence[FakeExecutor]) -> list[int]:
        return [len(fake.dispatches) for fake in fakes]

    async with pair(tokenizer) as (dispatcher, fakes):
        fakes[0].reject = saying("INTERNAL", grpc.StatusCode.INTERNAL)  # type: ignore[assignment]
        await ask(dispatcher, 8)
        before = dispatched(fakes)
        state = dispatcher.fleet.states[0]
        state.half_open = True
        assert (await ask(dispatcher, 6)).count(False) == 1
        assert dispatched(fakes)[0] == before[0] + 1 and state.tripped
        fakes[0].reject = lambda dispatch: None
        state.half_open = True
        assert all(await ask(dispatcher, 6))
        assert not state.tripped
        assert dispatched(fakes)[0] > before[0] + 2
