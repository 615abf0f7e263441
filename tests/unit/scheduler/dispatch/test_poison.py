"""Requests that crash whatever runs them: they end after a few crashes, and all others are answered."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from lorafleet.v1 import executor_pb2
from scheduler.admission.admission import AdmittedRequest
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import InternalError
from scheduler.fleet.state import Phase
from scheduler.fleet_service import ON_TRIAL, snapshot
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor, ManualClock
from tests.support.services.scheduling import (
    LINK,
    SETTINGS,
    admitted,
    dispatcher_of,
    executors,
    expected_tokens,
    read_all,
    ready,
    running,
    tokens_in,
    until,
)

POISON = 66


def is_poison(dispatch: executor_pb2.Dispatch) -> bool:
    return dispatch.prompt_token_ids[0] == POISON


def counted(registry: CollectorRegistry) -> list[float | None]:
    """Poisons that crashed executors, and such that hung them."""
    name = "lorafleet_scheduler_poison_requests_total"
    return [registry.get_sample_value(name, {"cause": cause}) for cause in ("crashed", "hung")]


@asynccontextmanager
async def poisonable(
    count: int,
    tokenizer: Tokenizer,
    clock: ManualClock | None = None,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[tuple[Dispatcher, list[FakeExecutor]]]:
    """On a clock that stands still, so that no pause of this process is seen."""
    async with executors(count, step_s=0.002) as fakes:
        for fake in fakes:
            fake.crashes_on = is_poison
        addresses = [fake.address for fake in fakes]
        clock = clock or ManualClock()
        async with running(dispatcher_of(addresses, tokenizer, clock=clock, registry=registry)) as dispatcher:
            await ready(dispatcher, count)
            yield dispatcher, fakes


async def answers(dispatcher: Dispatcher, requests: Sequence[AdmittedRequest]) -> None:
    """Each gets its own tokens."""
    readers = [asyncio.create_task(read_all(dispatcher.submit(request, None))) for request in requests]
    for request, reader in zip(requests, readers, strict=True):
        assert tokens_in(await reader) == expected_tokens(request)


async def fails(dispatcher: Dispatcher, request: AdmittedRequest, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InternalError) as caught:
        await read_all(dispatcher.submit(request, None))
    [record] = [each for each in caplog.records if caught.value.metadata["error_id"] in each.getMessage()]
    assert record.levelno == logging.ERROR and record.exc_info
    assert request.request_id in str(record.exc_info[1])


@pytest.mark.parametrize("count", [1, 2])
async def test_a_poison_ends_after_three_crashes_and_nothing_else_does(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """Beside streams with progress and a crowd that starts with it; on one executor, and on two."""
    registry = CollectorRegistry()
    async with poisonable(count, tokenizer, registry=registry) as (dispatcher, fakes):
        assert counted(registry) == [0, 0]  # An increase is seen only from there.
        crowd = [admitted(f"r{n}", prompt=[n + 100], max_new_tokens=20 + n) for n in range(24)]
        others = asyncio.create_task(answers(dispatcher, crowd))
        await fails(dispatcher, admitted("poison", prompt=[POISON]), caplog)
        await others
        assert sum(fake.crashes for fake in fakes) == 3
        assert not any(state.on_trial for state in dispatcher.fleet.states)
        assert counted(registry) == [1, 0]


async def test_several_poisons_at_once_fail_none_of_those_that_were_with_them(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with poisonable(2, tokenizer) as (dispatcher, fakes):
        crowd = [admitted(f"r{n}", prompt=[n + 100]) for n in range(40)]
        poisons = [admitted(f"poison{n}", prompt=[POISON]) for n in range(3)]
        await asyncio.gather(
            answers(dispatcher, crowd[:20]),
            *(fails(dispatcher, poison, caplog) for poison in poisons),
            answers(dispatcher, crowd[20:]),
        )
        assert sum(fake.crashes for fake in fakes) <= 3 * len(poisons)


async def test_who_makes_progress_between_crashes_is_no_suspect(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    def breaks(dispatch: executor_pb2.Dispatch) -> bool:
        index = fake.running[dispatch.dispatch_id][1]
        return index % 3 == 0 and index > len(dispatch.output_token_ids)

    fake.crashes_on = breaks
    await answers(dispatcher, [admitted(max_new_tokens=14)])
    assert fake.crashes == 4


async def test_what_is_lost_after_a_pause_of_this_process_proves_nothing(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    async with poisonable(1, tokenizer, clock) as (dispatcher, [fake]):

        def stands_still_four_times(dispatch: executor_pb2.Dispatch) -> bool:
            if is_poison(dispatch) and fake.crashes < 4:
                clock.advance(60.0)
            return is_poison(dispatch)

        fake.crashes_on = stands_still_four_times
        poison = asyncio.create_task(fails(dispatcher, admitted("poison", prompt=[POISON]), caplog))
        await until(lambda: fake.crashes >= 4)
        for _ in range(8):
            clock.advance(0.9)  # Without a pause.
            dispatcher.sweep()
        await poison
        assert fake.crashes > 5


async def test_a_trial_begins_with_the_first_report_of_a_seat(tokenizer: Tokenizer) -> None:
    """Another scheduler may have taken it by the next sweep; here is none."""
    settings = replace(SETTINGS, sweep_interval_s=3600.0)
    async with executors(1, step_s=0.002) as [fake]:
        fake.crashes_on = is_poison
        dispatcher = dispatcher_of([fake.address], tokenizer, settings, clock=ManualClock())
        async with running(dispatcher):
            await ready(dispatcher, 1)
            poison = dispatcher.submit(admitted("poison", prompt=[POISON]), None)
            await until(lambda: fake.crashes == 2)
            seats, fake.hello.max_seats = fake.hello.max_seats, 0
            await until(lambda: any(state.on_trial for state in dispatcher.fleet.states))
            assert fake.crashes == 2
            [seen] = snapshot(dispatcher.fleet, dispatcher.queue).executors
            assert (seen.state, seen.on_trial, seen.detail) == (Phase.READY, True, ON_TRIAL)
            fake.hello.max_seats = seats
            with pytest.raises(InternalError):
                await asyncio.wait_for(read_all(poison), 10.0)
            assert fake.crashes == 3
            [seen] = snapshot(dispatcher.fleet, dispatcher.queue).executors
            assert not seen.on_trial and seen.detail != ON_TRIAL


async def test_who_hangs_executors_is_counted_apart(tokenizer: Tokenizer) -> None:
    """They say nothing any more, and nothing else ends their streams."""
    registry, link = CollectorRegistry(), replace(LINK, report_timeout_s=0.3)
    async with executors(1, step_s=0.002) as [fake]:

        def hangs(dispatch: executor_pb2.Dispatch) -> bool:
            fake.mute = True
            return False

        fake.crashes_on = hangs
        dispatcher = dispatcher_of(
            [fake.address], tokenizer, link=link, clock=ManualClock(), registry=registry
        )
        async with running(dispatcher):
            await ready(dispatcher, 1)
            poison = asyncio.create_task(read_all(dispatcher.submit(admitted("poison"), None)))
            while not poison.done():
                fake.mute = bool(fake.running)  # A new stream has none.
                await asyncio.sleep(0.005)
            with pytest.raises(InternalError):
                await poison
            assert counted(registry) == [0, 1]


async def test_a_suspect_can_be_cancelled_while_it_waits_for_its_trial(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    """Also while the executor is not quiet yet: what has no token there holds the trial up."""
    fake.crashes_on = is_poison
    live = dispatcher.submit(admitted("poison", prompt=[POISON]), None)
    async with asyncio.timeout(60):
        while fake.crashes < 2:
            await asyncio.sleep(0)
    dispatcher.cancel(live)
    dispatcher.check()
    await answers(dispatcher, [admitted("after")])
    assert fake.crashes == 2
