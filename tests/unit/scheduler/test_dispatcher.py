"""Accepted requests over real streams to fake executors: none is lost, no token is repeated or missing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from lorafleet.v1 import common_pb2, executor_pb2, inference_pb2
from scheduler.dispatcher import Dispatcher
from scheduler.errors import (
    DeadlineExceeded,
    Draining,
    ExecutorFailed,
    IncompatibleAdapter,
    InternalError,
    NoExecutor,
    QueueFull,
    SlowClient,
    StoreUnavailable,
    Superseded,
)
from scheduler.executor_state import Phase
from scheduler.fakes import FakeExecutor, ManualClock
from scheduler.tokenizer import Tokenizer
from tests.support.scheduling import (
    LINK,
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
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def fake() -> AsyncIterator[FakeExecutor]:
    async with executors(1) as fakes:
        yield fakes[0]


@pytest.fixture
async def dispatcher(fake: FakeExecutor, tokenizer: Tokenizer) -> AsyncIterator[Dispatcher]:
    async with running(dispatcher_of([fake.address], tokenizer)) as started:
        await ready(started)
        yield started


async def test_an_answer_in_order_to_its_end(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    request = admitted(max_new_tokens=20)
    live = dispatcher.submit(request, None)
    pieces = await read_all(live)
    assert tokens_in(pieces) == expected_tokens(request)
    assert [bool(piece.finish) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish == LENGTH
    assert live.completion_tokens == 20
    assert dispatcher.num_live == 0
    assert await live.outbox.get() is None


async def test_requests_that_come_together_go_out_together(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    """Also when each is accepted in a turn of the loop of its own, as requests from a network are."""
    lives = []
    for number in range(8):
        lives.append(dispatcher.submit(admitted(f"r{number}"), None))
        await asyncio.sleep(0)
    for live in lives:
        await read_all(live)
    sizes = [len(command.dispatch.dispatches) for command in fake.commands if command.HasField("dispatch")]
    assert sum(sizes) == 8
    assert len(sizes) <= 4


async def test_what_an_executor_is_sent(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    request = admitted(digest=DIGEST, stop=["never"], time_limit_ms=60_000, resumed=[70])
    await read_all(dispatcher.submit(request, None))
    [dispatch] = fake.dispatches
    assert (dispatch.request_id, dispatch.digest) == ("r1", DIGEST)
    assert (list(dispatch.prompt_token_ids), list(dispatch.output_token_ids)) == ([11, 12, 13], [70])
    assert not dispatch.stopping.stop_sequences
    assert dispatch.stopping.time_limit_ms == 0
    assert 0 < dispatch.time_left_ms <= 60_000
    assert (dispatch.sampling.seed, dispatch.cache_salt) == (5, b"salt")


async def test_resumption_after_the_stream_broke(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.break_after = 7
    request = admitted(max_new_tokens=20)
    assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
    first, second = fake.dispatches
    assert first.dispatch_id != second.dispatch_id
    assert list(second.output_token_ids) == expected_tokens(request)[:7]
    assert (second.digest, second.sampling) == (first.digest, first.sampling)


async def test_resumption_on_another_executor(tokenizer: Tokenizer) -> None:
    async with executors(2) as fakes:
        addresses = [fake.address for fake in fakes]
        async with running(dispatcher_of(addresses, tokenizer)) as dispatcher:
            await ready(dispatcher, 2)
            requests = [admitted(f"r{n}", digest=DIGEST, max_new_tokens=60, prompt=[n + 1]) for n in range(6)]
            lives = [dispatcher.submit(request, None) for request in requests]
            readers = [asyncio.create_task(read_all(live)) for live in lives]
            await until(lambda: all(len(live.progress.output) > 5 for live in lives))
            [busy] = [fake for fake in fakes if fake.running]
            await busy.stop()
            for reader, request in zip(readers, requests, strict=True):
                assert tokens_in(await reader) == expected_tokens(request)


async def test_a_restarted_executor_comes_back(tokenizer: Tokenizer) -> None:
    async with executors(1) as [first], running(dispatcher_of([first.address], tokenizer)) as dispatcher:
        await ready(dispatcher)
        request = admitted(max_new_tokens=100)
        reader = asyncio.create_task(read_all(live := dispatcher.submit(request, None)))
        await until(lambda: len(live.progress.output) > 3)
        await first.stop()
        await until(lambda: not dispatcher.fleet.any_ready)
        second = FakeExecutor(LINK.fingerprint)
        second.hello.instance_id = "second"
        await second.start(int(first.address.rpartition(":")[2]))
        assert tokens_in(await reader) == expected_tokens(request)
        assert dispatcher.fleet.states[0].instance_id == "second"
        await second.stop()


async def test_an_executor_that_is_away_for_hours_comes_back(tokenizer: Tokenizer) -> None:
    async with executors(1) as [fake], running(dispatcher_of([fake.address], tokenizer)) as dispatcher:
        await ready(dispatcher)
        fake.mute = True
        dispatcher.fleet._links[fake.address]._failures = 5000
        await until(lambda: not dispatcher.fleet.any_ready)
        fake.mute = False
        await ready(dispatcher)


async def test_a_hung_executor_loses_its_requests(tokenizer: Tokenizer) -> None:
    async with (
        executors(2) as fakes,
        running(dispatcher_of([fake.address for fake in fakes], tokenizer)) as dispatcher,
    ):
        await ready(dispatcher, 2)
        request = admitted(max_new_tokens=60)
        reader = asyncio.create_task(read_all(live := dispatcher.submit(request, None)))
        await until(lambda: len(live.progress.output) > 3)
        [busy] = [fake for fake in fakes if fake.running]
        busy.mute = True
        state = dispatcher.fleet.state(busy.address)
        assert state is not None
        await until(lambda: state.phase is Phase.HUNG)
        assert tokens_in(await reader) == expected_tokens(request)
        busy.mute = False
        await ready(dispatcher, 2)


async def test_a_stuck_step_is_hung_although_reports_come(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.frozen = True
    stuck = executor_pb2.Load(last_step_age_ms=61_000, running=1)
    fake.extra_events = [executor_pb2.ExecutorEvent(load=stuck)]
    await until(lambda: fake.streams == 2)


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


async def test_a_request_can_end_while_it_pauses(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.reject = lambda _: executor_pb2.Rejected(reason="STORE_UNAVAILABLE", message="away", retryable=True)
    live = dispatcher.submit(admitted(digest=DIGEST), None)
    await until(lambda: live.pause is not None)
    dispatcher.cancel(live)
    assert dispatcher.num_live == 0
    await asyncio.sleep(2 * SETTINGS.retry_pause_s)
    dispatcher.check()
    assert len(fake.dispatches) == 1


async def test_a_bug_with_one_text_fails_that_request_alone(
    dispatcher: Dispatcher, fake: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = dispatcher.submit(admitted("good"), None), dispatcher.submit(admitted("bad"), None)
    monkeypatch.setattr(bad, "flush", lambda now: 1 // 0)
    with pytest.raises(InternalError):
        await read_all(bad)
    assert tokens_in(await read_all(good)) == expected_tokens(good.admitted)
    assert fake.streams == 1


async def test_a_bug_while_writing_ends_the_stream_and_is_logged(
    dispatcher: Dispatcher,
    fake: FakeExecutor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def write(call: object, command: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr("grpc.aio._call.StreamStreamCall.write", write)
    for name in ("taken by the write that waits already", "taken by the next"):
        request = admitted(name)
        assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)
    assert fake.streams == 2
    assert "bug while writing" in caplog.text


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


async def test_a_lost_residency_report_opens_the_stream_anew(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    entry = executor_pb2.ResidencyEntry(digest=DIGEST, tier=3, slot=2)
    fake.extra_events = [
        executor_pb2.ExecutorEvent(residency=executor_pb2.ResidencyDelta(number=1, added=[entry]))
    ]
    await until(lambda: [row.digest for row in dispatcher.fleet.residency()] == [DIGEST])
    fake.extra_events = [executor_pb2.ExecutorEvent(residency=executor_pb2.ResidencyDelta(number=3))]
    await until(lambda: fake.streams == 2)
    assert dispatcher.fleet.residency() == []


async def test_cancelling_frees_everything_at_once(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    """C29: waiting, running, ended and twice."""
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
    assert pieces[-1].finish == STOP
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
    lives = [dispatcher.submit(admitted(f"r{n}"), 0.05) for n in range(9)]
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
    assert pieces[-1].finish == common_pb2.FINISH_REASON_TIME_LIMIT
    assert tokens_in(pieces) == expected_tokens(live.admitted)[: live.completion_tokens]
    fake.load_state = executor_pb2.LOAD_STATE_DRAINING
    await until(lambda: not dispatcher.fleet.any_ready)
    pieces = await read_all(dispatcher.submit(admitted(time_limit_ms=30), None))
    assert [(piece.token_ids, piece.finish) for piece in pieces] == [
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


async def test_dropping_reaches_who_is_connected(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    dispatcher.fleet.drop(DIGEST)
    await until(lambda: any(command.drop.digest == DIGEST for command in fake.commands))


async def test_a_client_that_does_not_read_is_given_up(fake: FakeExecutor, tokenizer: Tokenizer) -> None:
    clock = ManualClock()
    settings = replace(SETTINGS, max_outbox_tokens=10)
    async with running(dispatcher_of([fake.address], tokenizer, settings, clock=clock)) as dispatcher:
        await ready(dispatcher)
        hung_up = asyncio.Event()
        live = dispatcher.submit(admitted(max_new_tokens=4000), None)
        live.hang_up = hung_up.set
        await until(lambda: len(live.progress.output) > 100)
        clock.advance(settings.slow_client_timeout_s - 1)
        dispatcher.sweep()
        assert await live.outbox.get()
        await until(lambda: live.outbox.full_since is not None)
        clock.advance(settings.slow_client_timeout_s - 1)
        dispatcher.sweep()
        assert not live.ended
        clock.advance(1)
        dispatcher.sweep()
        assert hung_up.is_set()
        await live.outbox.get()
        with pytest.raises(SlowClient):
            await live.outbox.get()
        await until(lambda: not fake.running)


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


async def test_without_an_executor_requests_wait_for_a_while(tokenizer: Tokenizer) -> None:
    settings = replace(SETTINGS, queue_timeout_s=0.1)
    async with running(dispatcher_of(["127.0.0.1:1"], tokenizer, settings)) as dispatcher:
        live = dispatcher.submit(admitted(), None)
        with pytest.raises(NoExecutor, match="no executor is ready") as caught:
            await read_all(live)
        assert caught.value.retry_after_s


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("model_fingerprint", "sha256:other", "sha256:other"), ("protocol_version", 2, "protocol 2")],
)
async def test_a_refused_executor_is_named(
    tokenizer: Tokenizer, field: str, value: object, text: str
) -> None:
    async with executors(1) as [fake]:
        setattr(fake.hello, field, value)
        async with running(dispatcher_of([fake.address], tokenizer)) as dispatcher:
            waiting = dispatcher.submit(admitted("before"), None)
            with pytest.raises(NoExecutor, match=text):
                await read_all(waiting)
            [status] = dispatcher.fleet.snapshot(dispatcher.queue).executors
            assert (status.state, status.address) == (Phase.REFUSED, fake.address)
            assert text in status.detail
            with pytest.raises(NoExecutor, match=fake.address):
                dispatcher.submit(admitted("after"), None)
            setattr(fake.hello, field, {"model_fingerprint": LINK.fingerprint, "protocol_version": 1}[field])
            await ready(dispatcher)


async def test_an_adapter_that_no_executor_can_hold(dispatcher: Dispatcher, tokenizer: Tokenizer) -> None:
    with pytest.raises(IncompatibleAdapter, match="rank 64"):
        dispatcher.submit(admitted(digest=DIGEST, max_rank=64), None)
    with pytest.raises(IncompatibleAdapter, match=r"2 places for full heads .*--max-full-heads"):
        dispatcher.submit(replace(admitted(digest=DIGEST), full_heads=2), None)
    async with executors(1) as [fake], running(dispatcher_of([fake.address], tokenizer)) as fresh:
        early = fresh.submit(admitted(digest=DIGEST, max_rank=64), None)
        with pytest.raises(IncompatibleAdapter):
            await read_all(early)


async def test_a_resumed_request_with_nothing_left_ends_at_once(
    dispatcher: Dispatcher, fake: FakeExecutor, tokenizer: Tokenizer
) -> None:
    complete = admitted(max_new_tokens=2, resumed=[50, 51])
    [end] = await read_all(dispatcher.submit(complete, None))
    assert (end.finish, end.token_ids, end.output_index) == (LENGTH, [], 2)
    eos = min(tokenizer.eos_token_ids)
    [end] = await read_all(dispatcher.submit(admitted(resumed=[50, eos]), None))
    assert end.finish == STOP
    stopped = tokenizer.encode("so stop", add_special_tokens=False)
    [end] = await read_all(dispatcher.submit(admitted(resumed=stopped, stop=["stop"]), None))
    assert (end.finish, end.token_ids, end.text) == (STOP, [], "")
    assert not fake.dispatches


async def test_hints_go_out_for_groups_without_room(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.frozen = True
    lives = [dispatcher.submit(admitted(f"r{n}"), None) for n in range(8)]
    await until(lambda: len(fake.running) == 8)
    lives += [dispatcher.submit(admitted(f"a{n}", digest=DIGEST), None) for n in range(3)]
    await until(lambda: any(command.HasField("prefetch") for command in fake.commands))
    [hint] = [command.prefetch for command in fake.commands if command.HasField("prefetch")]
    assert (hint.digest, hint.expected_uses) == (DIGEST, 3)
    for live in lives:
        dispatcher.cancel(live)


async def test_more_requests_than_seats_over_two_executors(tokenizer: Tokenizer) -> None:
    async with (
        executors(2, seats=3, step_s=0.002) as fakes,
        running(dispatcher_of([fake.address for fake in fakes], tokenizer)) as dispatcher,
    ):
        await ready(dispatcher, 2)
        digests = ["", *(f"sha256:{n}" for n in range(9))]
        requests = [admitted(f"r{n}", digest=digests[n % 10], prompt=[n + 1]) for n in range(40)]
        readers = [asyncio.create_task(read_all(dispatcher.submit(request, None))) for request in requests]
        for reader, request in zip(readers, requests, strict=True):
            assert tokens_in(await reader) == expected_tokens(request)
        assert all(fake.dispatches for fake in fakes)


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
