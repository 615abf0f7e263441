"""Requests that would come too late are refused at once; what was accepted, or is unknown, never is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.live_request import LiveRequest
from scheduler.errors import DeadlineExceeded, DeadlineUnreachable, QueueTooLong
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
)

TOKENS = 4
LINE = 60  # Requests that wait in a test: 0.6 s of work.


@asynccontextmanager
async def busy(
    folder: Path, *, tells_rates: bool = True, max_queue_s: float = SETTINGS.max_queue_s
) -> AsyncIterator[tuple[Dispatcher, CollectorRegistry]]:
    """Two seats, and so many answers that ended after a wait that estimates are trusted."""
    registry, settings = CollectorRegistry(), replace(SETTINGS, max_queue_s=max_queue_s)
    async with executors(1, seats=2, step_s=0.005) as [fake]:
        fake.tells_rates = tells_rates
        dispatcher = dispatcher_of([fake.address], tiny_tokenizer(folder), settings, registry=registry)
        async with running(dispatcher):
            await ready(dispatcher)
            for name, count in (("first", 10), ("warm", 40)):
                await answers(submit(dispatcher, name, count))
            yield dispatcher, registry


def submit(
    dispatcher: Dispatcher, name: str, count: int, deadline_s: float | None = None
) -> list[LiveRequest]:
    return [
        dispatcher.submit(admitted(f"{name}-{n}", max_new_tokens=TOKENS), deadline_s) for n in range(count)
    ]


async def answers(lives: list[LiveRequest]) -> None:
    """All of them whole, and their own."""
    for live, chunks in zip(lives, await asyncio.gather(*map(read_all, lives)), strict=True):
        assert tokens_in(chunks) == expected_tokens(live.admitted)


def refused(registry: CollectorRegistry, reason: str) -> float | None:
    return registry.get_sample_value("lorafleet_scheduler_refused_by_estimate_total", {"reason": reason})


async def test_a_deadline_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    async with busy(tmp_path) as (dispatcher, registry):
        waiting = submit(dispatcher, "waiting", LINE)
        with pytest.raises(DeadlineUnreachable) as caught:
            dispatcher.submit(admitted("late", max_new_tokens=TOKENS), 0.08)
        assert float(caught.value.metadata["estimate_s"]) > 0.2
        assert dispatcher.num_live == LINE
        patient = dispatcher.submit(admitted("patient", max_new_tokens=TOKENS), 60.0)
        await answers([*waiting, patient])
        assert refused(registry, "DEADLINE_UNREACHABLE") == 1
        ratios = registry.get_sample_value("lorafleet_scheduler_estimate_ratio_count")
        assert ratios is not None and ratios > LINE


async def test_what_was_accepted_before_is_never_refused_for_an_estimate(tmp_path: Path) -> None:
    async with busy(tmp_path, max_queue_s=0.01) as (dispatcher, registry):
        waiting = [
            dispatcher.submit(admitted(f"w{n}", max_new_tokens=TOKENS), None, again=True) for n in range(LINE)
        ]
        resumed = dispatcher.submit(admitted("again", max_new_tokens=TOKENS), None, again=True)
        late = dispatcher.submit(admitted("late", max_new_tokens=TOKENS), 0.1, again=True)
        await answers([*waiting, resumed])
        with pytest.raises(DeadlineExceeded):
            await read_all(late)
        assert refused(registry, "DEADLINE_UNREACHABLE") == refused(registry, "QUEUE_TOO_LONG") == 0


async def test_nobody_is_refused_where_executors_do_not_tell_how_fast_they_are(tmp_path: Path) -> None:
    async with busy(tmp_path, tells_rates=False, max_queue_s=0.01) as (dispatcher, _):
        waiting = submit(dispatcher, "waiting", LINE)
        late = dispatcher.submit(admitted("late", max_new_tokens=TOKENS), 0.08)
        await answers(waiting)
        with pytest.raises(DeadlineExceeded):
            await read_all(late)


async def test_without_a_deadline_the_wait_is_bounded_where_that_is_asked_for(tmp_path: Path) -> None:
    async with busy(tmp_path, max_queue_s=0.25) as (dispatcher, registry):
        waiting, refusals = list[LiveRequest](), 0
        for number in range(LINE):
            try:
                waiting += submit(dispatcher, f"n{number}", 1)
            except QueueTooLong as refusal:
                refusals += 1
                assert refusal.retry_after_s is not None and refusal.retry_after_s >= 1.0
        assert waiting and 0 < refusals == LINE - len(waiting) == refused(registry, "QUEUE_TOO_LONG")
        await answers(waiting)


async def test_nobody_is_refused_while_a_seat_is_free(tmp_path: Path) -> None:
    async with busy(tmp_path, max_queue_s=0.001) as (dispatcher, registry):
        for number in range(6):
            await answers(submit(dispatcher, f"n{number}", 1, deadline_s=30.0))
            await answers(submit(dispatcher, f"m{number}", 1))
        assert refused(registry, "QUEUE_TOO_LONG") == 0
