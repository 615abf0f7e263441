"""However much is to be placed or ended at once, the event loop has a turn for others in between."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from scheduler.dispatch import planner, reaper
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.policy import Placement, Policy
from scheduler.errors import NoExecutor
from scheduler.fleet.state import Phase
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import (
    SETTINGS,
    admitted,
    dispatcher_of,
    expected_tokens,
    read_all,
    running,
    tokens_in,
    until,
)


class Turns:
    """Counts turns of the event loop, while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> "Turns":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_a_large_plan_leaves_turns_to_others(
    dispatcher: Dispatcher, fake: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "SLICE_S", 0.0)
    lives = [dispatcher.submit(admitted(f"r{n}", max_new_tokens=200), None) for n in range(8)]
    async with Turns() as turns:
        while not lives[0].dispatch_id:
            await asyncio.sleep(0)
        before = turns.count
        while not all(live.dispatch_id for live in lives):
            await asyncio.sleep(0)
        assert turns.count - before >= 6
    assert dispatcher.fleet.states[0].num_running == 8
    for live in lives:
        dispatcher.cancel(live)


async def test_what_was_placed_before_a_plan_fails_is_sent(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as the executor's, so nobody else would ever take it up."""
    choose, calls = Policy.next, count()

    def fails_once(policy: Policy, now: float) -> Placement | None:
        if next(calls) == 1:
            raise RuntimeError("a bug")
        return choose(policy, now)

    monkeypatch.setattr(Policy, "next", fails_once)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    requests = [admitted("first"), admitted("second")]
    lives = [dispatcher.submit(request, None) for request in requests]
    async with asyncio.timeout(10):
        for request, live in zip(requests, lives, strict=True):
            assert tokens_in(await read_all(live)) == expected_tokens(request)


async def test_a_request_that_cannot_be_sent_ends_alone(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (dispatcher.submit(admitted(name), None) for name in ("bad", "good"))
    monkeypatch.setattr(type(bad.progress), "dispatch", _failing(bad.progress, type(bad.progress).dispatch))
    with pytest.raises(Exception, match="internal error"):
        await read_all(bad)
    assert await read_all(good)


def _failing(bad: object, dispatch: object) -> object:
    def made(progress: object, *args: object) -> object:
        if progress is bad:
            raise RuntimeError("a bug")
        return dispatch(progress, *args)  # type: ignore[operator]

    return made


@pytest.mark.parametrize("refused", [True, False])
async def test_many_that_end_at_once_leave_turns_to_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Those that nobody ever runs, or that have waited for too long. An error is made for whom it ends."""
    monkeypatch.setattr(reaper, "MAX_A_TURN", 5)
    errors: list[NoExecutor] = []
    make = NoExecutor.__init__

    def counted(error: NoExecutor, message: str) -> None:
        errors.append(error)
        make(error, message)

    monkeypatch.setattr(NoExecutor, "__init__", counted)
    settings = replace(SETTINGS, sweep_interval_s=3600.0 if refused else 0.01, queue_timeout_s=0.05)
    dispatcher = dispatcher_of(["127.0.0.1:1"], tokenizer, settings)
    async with running(dispatcher):
        lives = [dispatcher.submit(admitted(f"r{n}"), None) for n in range(40)]
        async with Turns() as turns:
            if refused:
                dispatcher.fleet.states[0].phase = Phase.REFUSED
                dispatcher.on_phase()
            while not any(live.ended for live in lives):
                await asyncio.sleep(0)
            before = turns.count
            assert sum(live.ended for live in lives) == 5
            await until(lambda: all(live.ended for live in lives))
            assert turns.count - before >= 7
        assert len(errors) == len(lives)
        for live in lives:
            with pytest.raises(NoExecutor):
                await read_all(live)
