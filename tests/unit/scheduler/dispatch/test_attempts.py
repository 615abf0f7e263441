"""Attempts that an executor refuses, breaks or tells wrongly: requests go on, or fail with the cause."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from lorafleet.v1 import common_pb2, executor_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import (
    ExecutorFailed,
    NoExecutor,
    StoreUnavailable,
)
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor, ManualClock
from tests.support.services.scheduling import (
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

DIGEST = "sha256:" + "a" * 64
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def test_busy_rejections_go_back_to_their_place(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    left = 5

    def reject(dispatch: executor_pb2.Dispatch) -> executor_pb2.Rejected | None:
        nonlocal left
        left -= 1
        return executor_pb2.Rejected(reason="NO_SEATS", message="full", retryable=True) if left >= 0 else None

    fake.reject = reject
    request = admitted()
    assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
    assert len(fake.dispatches) == 6


async def test_executors_are_told_how_long_a_request_has_waited(
    fake: FakeExecutor, tokenizer: Tokenizer
) -> None:
    clock = ManualClock(100.0)
    async with running(dispatcher_of([fake.address], tokenizer, clock=clock)) as dispatcher:
        await ready(dispatcher)
        fake.reject = lambda _: executor_pb2.Rejected(reason="NO_SEATS", retryable=True)
        live = dispatcher.submit(admitted(), None)
        await until(lambda: len(fake.dispatches) > 1)
        clock.advance(2.5)
        await until(lambda: fake.dispatches[-1].waited_ms > 0)
        fake.reject = lambda _: None
        await read_all(live)
    assert fake.dispatches[0].waited_ms == 0 and fake.dispatches[-1].waited_ms == 2500


async def test_failed_attempts_are_bounded(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.reject = lambda _: executor_pb2.Rejected(reason="OUT_OF_MEMORY", message="oom", retryable=True)
    with pytest.raises(NoExecutor, match=r"3 failed attempts.*oom") as caught:
        await read_all(dispatcher.submit(admitted(), None))
    assert caught.value.retry_after_s
    assert len(fake.dispatches) == 3


async def test_a_store_that_is_away_for_a_moment_costs_no_request(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    """Attempts wait for each other, while others go on; the request keeps its place."""
    times: list[float] = []

    def reject(dispatch: executor_pb2.Dispatch) -> executor_pb2.Rejected | None:
        if not dispatch.digest or len(times) == 2:
            return None
        times.append(asyncio.get_running_loop().time())
        return executor_pb2.Rejected(reason="STORE_UNAVAILABLE", message="away", retryable=True)

    fake.reject = reject
    live = dispatcher.submit(admitted("late", digest=DIGEST), None)
    await until(lambda: live.pause is not None)
    dispatcher.check()
    other = dispatcher.submit(admitted("other"), None)
    assert tokens_in(await read_all(other)) == expected_tokens(other.admitted)
    assert tokens_in(await read_all(live)) == expected_tokens(live.admitted)
    assert times[1] - times[0] >= SETTINGS.retry_pause_s


async def test_a_store_that_stays_away_is_named(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.reject = lambda _: executor_pb2.Rejected(reason="STORE_UNAVAILABLE", message="away", retryable=True)
    with pytest.raises(StoreUnavailable, match=r"3 failed attempts.*away"):
        await read_all(dispatcher.submit(admitted(digest=DIGEST), None))


async def test_a_request_can_end_while_it_pauses(fake: FakeExecutor, tokenizer: Tokenizer) -> None:
    fake.reject = lambda _: executor_pb2.Rejected(reason="STORE_UNAVAILABLE", message="away", retryable=True)
    settings = replace(SETTINGS, retry_pause_s=0.5)  # it is seen before it is over
    async with running(dispatcher_of([fake.address], tokenizer, settings)) as dispatcher:
        await ready(dispatcher)
        live = dispatcher.submit(admitted(digest=DIGEST), None)
        await until(lambda: live.pause is not None)
        dispatcher.cancel(live)
        assert dispatcher.num_live == 0
        await asyncio.sleep(2 * settings.retry_pause_s)
        dispatcher.check()
        assert len(fake.dispatches) == 1


async def test_progress_renews_the_attempts(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    def skip_third(step: executor_pb2.StepTokens) -> None:
        if step.first_output_index[0] == len(fake.dispatches[-1].output_token_ids) + 2:
            step.first_output_index[0] += 1

    fake.edit_step = skip_third
    request = admitted(max_new_tokens=12)
    assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
    assert len(fake.dispatches) == 6


async def test_a_final_rejection_reaches_the_client_with_its_cause(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    def reject(dispatch: executor_pb2.Dispatch) -> executor_pb2.Rejected | None:
        if not dispatch.digest:
            return None
        code = grpc.StatusCode.DATA_LOSS.value[0]
        return executor_pb2.Rejected(reason="DATA_LOSS", message="bytes differ", code=code)

    fake.reject = reject
    lives = [dispatcher.submit(admitted(f"bad{n}", digest=DIGEST), None) for n in range(3)]
    good = dispatcher.submit(admitted("good"), None)
    for live in lives:
        with pytest.raises(ExecutorFailed, match="bytes differ") as caught:
            await read_all(live)
        assert caught.value.code is grpc.StatusCode.DATA_LOSS
    assert tokens_in(await read_all(good)) == expected_tokens(good.admitted)
    fake.reject = lambda _: None
    again = dispatcher.submit(admitted("again", digest=DIGEST), None)
    assert tokens_in(await read_all(again)) == expected_tokens(again.admitted)


@pytest.mark.parametrize("offset", [-1, 1])
async def test_a_gap_or_overlap_fails_the_attempt(
    dispatcher: Dispatcher, fake: FakeExecutor, offset: int
) -> None:
    def skew(step: executor_pb2.StepTokens) -> None:
        if len(fake.dispatches) == 1 and step.first_output_index[0] == 4:
            step.first_output_index[0] += offset

    fake.edit_step = skew
    request = admitted(max_new_tokens=12)
    assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
    assert list(fake.dispatches[1].output_token_ids) == expected_tokens(request)[:4]
    await until(lambda: fake.cancelled == [fake.dispatches[0].dispatch_id])


async def test_events_of_other_attempts_are_dropped(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    old = executor_pb2.StepTokens(
        dispatch_ids=["old"], first_output_index=[0], token_counts=[1], token_ids=[9]
    )
    fake.extra_events = [
        executor_pb2.ExecutorEvent(step=old),
        executor_pb2.ExecutorEvent(finished=executor_pb2.Finished(dispatch_id="old", reason=STOP)),
        executor_pb2.ExecutorEvent(rejected=executor_pb2.Rejected(dispatch_id="old")),
    ]
    request = admitted()
    assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
    assert fake.streams == 1
