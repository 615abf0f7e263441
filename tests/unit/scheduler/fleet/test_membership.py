"""Executors join, leave and move under live streams: none ends for it, and what a name keeps follows it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import ExecutorFailed, IncompatibleAdapter
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.residency import Tier
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
    tiny_tokenizer,
    tokens_in,
    until,
)

DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeExecutor]]:
    async with executors(2, step_s=0.002) as started:
        yield started


def pods(fakes: Sequence[FakeExecutor]) -> list[Endpoint]:
    return [Endpoint(fake.address, f"pod-{number}") for number, fake in enumerate(fakes)]


def names(dispatcher: Dispatcher) -> list[str]:
    return [state.name for state in dispatcher.fleet.states]


async def test_who_joins_gets_requests_and_who_leaves_ends_what_it_has(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    registry = CollectorRegistry()
    first, second = pods(fakes)
    async with running(dispatcher_of([], tokenizer, registry=registry)) as dispatcher:
        dispatcher._metrics.missing_pins.follow(dispatcher.fleet.missing_pins)
        long = admitted("long", max_new_tokens=150)
        reader = asyncio.create_task(read_all(dispatcher.submit(long, None)))  # There is nobody yet.
        dispatcher.fleet.settle([first])
        await until(lambda: len(fakes[0].dispatches) == 1)
        dispatcher.fleet.settle([second])
        await ready(dispatcher)
        short = [admitted(f"r{n}") for n in range(4)]
        for request, live in [(each, dispatcher.submit(each, None)) for each in short]:
            assert tokens_in(await read_all(live)) == expected_tokens(request)
        assert (len(fakes[0].dispatches), len(fakes[1].dispatches)) == (1, 4)
        assert names(dispatcher) == ["pod-0", "pod-1"]
        assert registry.get_sample_value("lorafleet_scheduler_executors", {"state": "leaving"}) == 1
        dispatcher.fleet.index.check()
        assert tokens_in(await reader) == expected_tokens(long)
        await until(lambda: names(dispatcher) == ["pod-1"])
        assert registry.get_sample_value("lorafleet_scheduler_missing_pins", {"executor": "pod-0"}) is None
        dispatcher.fleet.index.check()
        assert fakes[0].cancelled == []


async def test_who_is_back_before_it_is_gone_never_was_away(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    async with running(dispatcher_of([fakes[0].address], tokenizer)) as dispatcher:
        await ready(dispatcher)
        request = admitted(max_new_tokens=100)
        live = dispatcher.submit(request, None)
        await until(lambda: len(fakes[0].dispatches) == 1)
        dispatcher.fleet.settle([])
        assert not dispatcher.fleet.any_ready
        dispatcher.fleet.settle([Endpoint(fakes[0].address)])
        assert dispatcher.fleet.any_ready
        assert tokens_in(await read_all(live)) == expected_tokens(request)
        assert tokens_in(await read_all(dispatcher.submit(admitted("r2"), None)))
        assert fakes[0].streams == 1


async def test_a_name_moves_when_what_runs_at_its_former_place_has_ended(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    async with running(dispatcher_of([], tokenizer)) as dispatcher:
        dispatcher.fleet.settle([Endpoint(fakes[0].address, "pod")])
        await ready(dispatcher)
        request = admitted(max_new_tokens=100)
        live = dispatcher.submit(request, None)
        await until(lambda: len(fakes[0].dispatches) == 1)
        dispatcher.fleet.settle([Endpoint(fakes[1].address, "pod")])
        later = dispatcher.submit(admitted("later"), None)
        assert tokens_in(await read_all(live)) == expected_tokens(request)
        assert tokens_in(await read_all(later)) == expected_tokens(admitted("later"))
        assert (len(fakes[0].dispatches), len(fakes[1].dispatches)) == (1, 1)
        assert [(state.name, state.address) for state in dispatcher.fleet.states] == [
            ("pod", fakes[1].address)
        ]


async def test_a_name_whose_former_place_is_dead_moves_at_once(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    """However long it would have waited before the next attempt there."""
    async with running(dispatcher_of([], tokenizer)) as dispatcher:
        dispatcher.fleet.settle([Endpoint("127.0.0.1:1", "pod")])
        dispatcher.fleet._links["pod"]._backoff = lambda: 3600.0  # type: ignore[method-assign]
        await until(lambda: dispatcher.fleet.states[0].streams == 1)
        dispatcher.fleet.settle([Endpoint(fakes[1].address, "pod")])
        await ready(dispatcher)


async def test_cordons_and_pins_follow_a_name_and_go_with_an_address(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    pod, other = Endpoint(fakes[0].address, "pod"), Endpoint(fakes[1].address)
    async with running(dispatcher_of([], tokenizer)) as dispatcher:
        fleet = dispatcher.fleet
        fleet.settle([pod, other])
        await ready(dispatcher, 2)
        for name in ("pod", other.name):
            fleet.pin(DIGEST, "acme/a", Tier.SLOT, [name])
            state = fleet.state(name)
            assert state
            state.cordoned = True
        fleet.settle([])
        await until(lambda: not fleet.states)
        assert fleet.pinned() == {("acme/a", DIGEST)}
        fleet.settle([pod, other])
        assert [(state.cordoned, state.name) for state in fleet.states] == [
            (True, "pod"),
            (False, other.name),
        ]
        assert fleet.missing_pins() == {"pod": 1, other.name: 0}
        fleet.unpin(DIGEST, "acme/a")
        assert fleet.pinned() == set()


async def test_a_pin_everywhere_is_one_on_those_that_join_and_its_end_reaches_those_that_left(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    for fake in fakes:
        fake.pages = True
    first, second = pods(fakes)
    async with running(dispatcher_of([], tokenizer)) as dispatcher:
        fleet = dispatcher.fleet
        fleet.settle([first])
        fleet.pin(DIGEST, "acme/a", Tier.SLOT)
        await until(lambda: DIGEST in fakes[0].pins)
        fleet.settle([second])
        await until(lambda: DIGEST in fakes[1].pins and len(fleet.states) == 1)
        fleet.unpin(DIGEST, "acme/a")
        fleet.settle([first, second])
        await until(lambda: DIGEST not in fakes[0].pins and DIGEST not in fakes[1].pins)
        assert fleet.pinned() == set()


async def test_what_only_one_could_run_that_left_waits_for_it_to_come_back(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    large, small = pods(fakes)
    fakes[1].hello.max_rank = 8
    async with running(dispatcher_of([], tokenizer)) as dispatcher:
        dispatcher.fleet.settle([large, small])
        await ready(dispatcher, 2)
        dispatcher.fleet.settle([small])
        await until(lambda: len(dispatcher.fleet.states) == 1)
        request = admitted(digest=DIGEST, max_rank=16)
        live = dispatcher.submit(request, None)
        dispatcher.fleet.settle([large, small])
        assert tokens_in(await read_all(live)) == expected_tokens(request)
        with pytest.raises(IncompatibleAdapter):
            dispatcher.submit(admitted("r2", digest=DIGEST, max_rank=17), None)


async def test_what_all_refuse_does_not_wait_for_one_that_left(
    tokenizer: Tokenizer, fakes: list[FakeExecutor]
) -> None:
    """Which may be gone for good: a fleet that was larger once tells clients as soon as any other."""
    refusal = executor_pb2.Rejected(reason="ADAPTER_NOT_FOUND", code=5, message="no such version")
    fakes[0].reject = lambda dispatch: refusal
    first, second = pods(fakes)
    patient = replace(SETTINGS, queue_timeout_s=3600.0)
    async with running(dispatcher_of([], tokenizer, patient)) as dispatcher:
        dispatcher.fleet.settle([first, second])
        await ready(dispatcher, 2)
        dispatcher.fleet.settle([first])
        await until(lambda: len(dispatcher.fleet.states) == 1)
        with pytest.raises(ExecutorFailed, match="no such version"):
            await read_all(dispatcher.submit(admitted(digest=DIGEST), None))
