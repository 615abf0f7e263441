"""A scheduler that stands still for a while, or is starved, takes nobody for hung or slow for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.fleet.state import Phase
from scheduler.heartbeat import MAX_BEAT_S, Heartbeat
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor, ManualClock
from tests.support.services.scheduling import (
    FINGERPRINT,
    LINK,
    SETTINGS,
    admitted,
    dispatcher_of,
    expected_tokens,
    read_all,
    ready,
    running,
    tokens_in,
    until,
)

HASTY = replace(LINK, report_timeout_s=0.4)


@asynccontextmanager
async def elsewhere() -> AsyncIterator[FakeExecutor]:
    """An executor on an event loop of its own, which goes on while the test's stands still."""
    fake = FakeExecutor(FINGERPRINT)
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1) as thread:
        running_loop = thread.submit(loop.run_forever)
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fake.start(), loop))
            yield fake
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fake.stop(), loop))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.wrap_future(running_loop)
    loop.close()


@asynccontextmanager
async def with_heartbeat(fake: FakeExecutor, tokenizer: Tokenizer) -> AsyncIterator[Dispatcher]:
    heart = Heartbeat(lambda lag: None)
    heart.start()
    dispatcher = dispatcher_of([fake.address], tokenizer, link=HASTY, awake=heart.awake)
    async with running(dispatcher):
        await ready(dispatcher)
        yield dispatcher
    heart.stop()


async def stand_still() -> None:
    time.sleep(3 * HASTY.report_timeout_s)


async def starve() -> None:
    """A turn now and then, for as long as half a report may take."""
    for _ in range(6):
        time.sleep(HASTY.report_timeout_s / 2)
        await asyncio.sleep(0)


@pytest.mark.parametrize("pause", [stand_still, starve])
async def test_executors_are_not_hung_because_this_loop_was(
    pause: Callable[[], AsyncIterator[None]], tokenizer: Tokenizer
) -> None:
    async with elsewhere() as fake, with_heartbeat(fake, tokenizer) as dispatcher:
        request = admitted(max_new_tokens=100)
        reader = asyncio.create_task(read_all(live := dispatcher.submit(request, None)))
        await until(lambda: len(live.progress.output) > 5)
        await pause()
        assert tokens_in(await reader) == expected_tokens(request)
        assert (fake.streams, len(fake.dispatches), live.failures) == (1, 1, 0)
        fake.mute = True
        await until(lambda: dispatcher.fleet.states[0].phase is Phase.HUNG)


async def test_a_pause_is_no_wait_for_an_executor(tokenizer: Tokenizer) -> None:
    clock, real = ManualClock(), ManualClock(1000.0)
    heart = Heartbeat(lambda lag: None, real)
    dispatcher = dispatcher_of(["127.0.0.1:1"], tokenizer, SETTINGS, clock=clock, awake=heart.awake)
    async with running(dispatcher):
        waiting = dispatcher.submit(admitted(), None)
        for each in (clock, real):
            each.advance(2 * SETTINGS.queue_timeout_s)
        heart.beat()
        dispatcher.sweep()
        assert not waiting.ended
        for _ in range(round(SETTINGS.queue_timeout_s / MAX_BEAT_S) + 1):
            real.advance(MAX_BEAT_S)
            heart.beat()
        dispatcher.sweep()
        assert waiting.ended
