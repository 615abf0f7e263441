"""What clients cause and get: whole answers, ends of every kind, and nothing left behind."""

import asyncio
from dataclasses import replace

import pytest

from lorafleet.v1 import common_pb2, executor_pb2, inference_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    NoExecutor,
    QueueFull,
    Superseded,
)
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

DIGEST = "sha256:" + "a" * 64
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def test_an_answer_in_order_to_its_end(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    request = admitted(max_new_tokens=20)
    live = dispatcher.submit(request, None)
    pieces = await read_all(live)
    assert tokens_in(pieces) == expected_tokens(request)
    assert [bool(piece.finish_reason) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish_reason == LENGTH
    assert live.completion_tokens == 20
    assert dispatcher.num_live == 0
    assert await live.outbox.get() is None


async def test_a_bug_with_one_text_fails_that_request_alone(
    dispatcher: Dispatcher, fake: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = dispatcher.submit(admitted("good"), None), dispatcher.submit(admitted("bad"), None)
    monkeypatch.setattr(bad, "flush", lambda now: 1 // 0)
    with pytest.raises(InternalError):
        await read_all(bad)
    assert tokens_in(await read_all(good)) == expected_tokens(good.admitted)
    assert fake.streams == 1


async def test_cancelling_frees_everything_at_once(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    """Requests that wait, requests that run, and again those that have just been cancelled."""
    fake.frozen = True
    lives = [dispatcher.submit(admitted(f"r{n}", digest=DIGEST), None) for n in range(12)]
    await until(lambda: len(fake.running) == 8)
    assert len(dispatcher.queue) == 4
    for live in lives[::-1]:
        dispatcher.cancel(live)
        dispatcher.cancel(live)
        dispatcher.check()
    assert (dispatcher.num_live, len(dispatcher.queue)) == (0, 0)
    await until(lambda: not fake.running)
    assert len(fake.cancelled) == 8


async def test_stop_strings_cut_and_cancel(
    dispatcher: Dispatcher, fake: FakeExecutor, tokenizer: Tokenizer
) -> None:
    answer = tokenizer.encode("go on, then stop. never more", add_special_tokens=False)
    fake.token_at = lambda dispatch, index: answer[index]
    live = dispatcher.submit(admitted(max_new_tokens=len(answer), stop=["stop."]), None)
    pieces = await read_all(live)
    assert "".join(piece.text for piece in pieces) == "go on, then "
    assert pieces[-1].finish_reason == STOP
    assert live.completion_tokens == len(tokens_in(pieces)) < len(answer)
    await until(lambda: fake.cancelled == [fake.dispatches[0].dispatch_id])


async def test_log_probabilities_stay_with_their_tokens(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    def add(step: executor_pb2.StepTokens) -> None:
        token = common_pb2.TokenLogprob(token_id=step.token_ids[0], logprob=-1)
        entry = step.logprobs.add(dispatch_id=step.dispatch_ids[0])
        entry.positions.add(chosen=token)
        if step.first_output_index[0] in (0, 3):  # Also with the first token of the second attempt.
            entry.prompt_positions.add()

    fake.edit_step = add
    fake.break_after = 3
    response = inference_pb2.ResponseOptions(logprobs=0, prompt_logprobs=0)
    request = admitted(max_new_tokens=9, response=response)
    pieces = await read_all(dispatcher.submit(request, None))
    chosen = [entry.chosen.token_id for piece in pieces for entry in piece.logprobs]
    assert chosen == tokens_in(pieces) == expected_tokens(request)
    assert [dispatch.HasField("prompt_logprobs") for dispatch in fake.dispatches] == [True, False]


async def test_the_deadline_counts_while_waiting_and_while_running(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    fake.frozen = True
    lives = [dispatcher.submit(admitted(f"r{n}"), 1.0) for n in range(9)]  # time to get there
    await until(lambda: len(fake.running) == 8)
    for live in lives:
        with pytest.raises(DeadlineExceeded):
            await read_all(live)
    await until(lambda: not fake.running)
    assert dispatcher.num_live == 0
    with pytest.raises(DeadlineExceeded):
        dispatcher.submit(admitted(), 0.0)


async def test_the_time_limit_counts_from_acceptance(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    live = dispatcher.submit(admitted(max_new_tokens=4000, time_limit_ms=80), None)
    pieces = await read_all(live)
    assert pieces[-1].finish_reason == common_pb2.FINISH_REASON_TIME_LIMIT
    assert tokens_in(pieces) == expected_tokens(live.admitted)[: live.completion_tokens]
    fake.load_state = executor_pb2.LOAD_STATE_DRAINING
    await until(lambda: not dispatcher.fleet.any_ready)
    pieces = await read_all(dispatcher.submit(admitted(time_limit_ms=30), None))
    assert [(piece.token_ids, piece.finish_reason) for piece in pieces] == [
        ([], common_pb2.FINISH_REASON_TIME_LIMIT)
    ]


async def test_a_second_call_with_the_name_ends_the_first(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.frozen = True
    first = dispatcher.submit(admitted("same"), None)
    other = dispatcher.submit(admitted("same", tenant="other"), None)
    second = dispatcher.submit(admitted("same"), None)
    with pytest.raises(Superseded):
        await read_all(first)
    fake.frozen = False
    for live in (second, other):
        assert tokens_in(await read_all(live)) == expected_tokens(live.admitted)


async def test_a_second_call_that_is_not_accepted_ends_nobody(
    fake: FakeExecutor, tokenizer: Tokenizer
) -> None:
    settings = replace(SETTINGS, max_queued_per_tenant=1)
    async with running(dispatcher_of(["127.0.0.1:1"], tokenizer, settings)) as dispatcher:
        first = dispatcher.submit(admitted("same"), None)
        with pytest.raises(QueueFull):
            dispatcher.submit(admitted("same"), None)
        assert not first.ended
        dispatcher.cancel(first)


async def test_queue_bounds(dispatcher: Dispatcher, fake: FakeExecutor, tokenizer: Tokenizer) -> None:
    settings = replace(SETTINGS, max_queued=3, max_queued_per_tenant=2)
    async with running(dispatcher_of(["127.0.0.1:1"], tokenizer, settings)) as small:
        lives = [small.submit(admitted(f"r{n}"), None) for n in range(2)]
        with pytest.raises(QueueFull, match="tenant 'acme'"):
            small.submit(admitted("r3"), None)
        lives.append(small.submit(admitted("r4", tenant="b"), None))
        with pytest.raises(QueueFull, match="the queue is full"):
            small.submit(admitted("r5", tenant="c"), None)
        for live in lives:
            small.cancel(live)


async def test_who_comes_after_the_told_delay_is_let_in_though_the_queue_is_full(
    tokenizer: Tokenizer,
) -> None:
    now = 0.0
    settings = replace(SETTINGS, max_queued=2)
    async with running(dispatcher_of(["127.0.0.1:1"], tokenizer, settings, clock=lambda: now)) as small:
        lives = [small.submit(admitted(f"r{n}"), None) for n in range(2)]
        with pytest.raises(QueueFull, match="the queue is full") as caught:
            small.submit(admitted("retry"), None)
        assert caught.value.retry_after_s
        now = caught.value.retry_after_s
        lives.append(small.submit(admitted("retry"), None))
        with pytest.raises(QueueFull):
            small.submit(admitted("other"), None)
        assert len(small.queue) == small.num_live == 3
        small.check()
        for live in lives:
            small.cancel(live)


async def test_what_was_accepted_before_has_room_that_new_ones_do_not_get(tokenizer: Tokenizer) -> None:
    """After a restart all that waited comes again, between new ones."""
    settings = replace(SETTINGS, max_queued=3, max_queued_per_tenant=2)
    async with running(dispatcher_of(["127.0.0.1:1"], tokenizer, settings)) as small:
        lives = [small.submit(admitted(f"new{n}"), None) for n in range(2)]
        lives += [small.submit(admitted(f"again{n}"), None, again=True) for n in range(2)]
        with pytest.raises(QueueFull, match="tenant 'acme'"):
            small.submit(admitted("again2"), None, again=True)
        lives += [small.submit(admitted(f"other{n}", tenant="b"), None, again=True) for n in range(2)]
        with pytest.raises(QueueFull, match="the queue is full"):
            small.submit(admitted("last", tenant="c"), None, again=True)
        for live in lives:
            small.cancel(live)


async def test_without_an_executor_requests_wait_for_a_while(tokenizer: Tokenizer) -> None:
    settings = replace(SETTINGS, queue_timeout_s=0.1)
    async with running(dispatcher_of(["127.0.0.1:1"], tokenizer, settings)) as dispatcher:
        live = dispatcher.submit(admitted(), None)
        with pytest.raises(NoExecutor, match="no executor is ready") as caught:
            await read_all(live)
        assert caught.value.retry_after_s


async def test_a_resumed_request_with_nothing_left_ends_at_once(
    dispatcher: Dispatcher, fake: FakeExecutor, tokenizer: Tokenizer
) -> None:
    complete = admitted(max_new_tokens=2, resumed=[50, 51])
    [end] = await read_all(dispatcher.submit(complete, None))
    assert (end.finish_reason, end.token_ids, end.output_index) == (LENGTH, [], 2)
    eos = min(tokenizer.eos_token_ids)
    [end] = await read_all(dispatcher.submit(admitted(resumed=[50, eos]), None))
    assert end.finish_reason == STOP
    stopped = tokenizer.encode("so stop", add_special_tokens=False)
    [end] = await read_all(dispatcher.submit(admitted(resumed=stopped, stop=["stop"]), None))
    assert (end.finish_reason, end.token_ids, end.text) == (STOP, [], "")
    assert not fake.dispatches


async def test_draining_lets_accepted_requests_end(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    live = dispatcher.submit(admitted(max_new_tokens=30), None)
    drained = asyncio.create_task(dispatcher.drain(10))
    await until(lambda: dispatcher.draining)
    with pytest.raises(Draining):
        dispatcher.submit(admitted("late"), None)
    assert tokens_in(await read_all(live)) == expected_tokens(live.admitted)
    assert await drained
    fake.frozen = True
    dispatcher.draining = False
    stuck = dispatcher.submit(admitted("stuck"), None)
    assert not await dispatcher.drain(0.02)
    await dispatcher.stop()
    with pytest.raises(Draining):
        await read_all(stuck)
