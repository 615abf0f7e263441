"""What executors are sent, and what becomes of requests when they are lost."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from lorafleet.v1 import common_pb2, executor_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import IncompatibleAdapter, NoExecutor
from scheduler.fleet.state import Phase
from scheduler.fleet_service import snapshot
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor
from tests.support.services.name_server import name_server
from tests.support.services.scheduling import (
    IMPATIENT,
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

DIGEST = "sha256:" + "a" * 64
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


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


async def test_what_comes_before_the_first_executor_waits_for_it(
    tokenizer: Tokenizer, fake: FakeExecutor
) -> None:
    """What executors take at most is not known then."""
    async with running(dispatcher_of([fake.address], tokenizer, SETTINGS)) as dispatcher:
        request = admitted(max_new_tokens=5)
        assert tokens_in(await read_all(dispatcher.submit(request, None))) == expected_tokens(request)


async def test_a_plan_that_sends_nothing_holds_nothing_up(tokenizer: Tokenizer, fake: FakeExecutor) -> None:
    """Reports of room wake the planner all the time; only after a batch it pauses."""
    settings = replace(SETTINGS, plan_pause_s=3600.0)
    async with running(dispatcher_of([fake.address], tokenizer, settings)) as dispatcher:
        await ready(dispatcher)
        dispatcher.on_room()
        await asyncio.sleep(0.01)
        assert tokens_in(await read_all(dispatcher.submit(admitted(), None))) == expected_tokens(admitted())


@pytest.mark.parametrize("ends_with_steps", [True, False])
async def test_an_end_comes_with_its_step_or_after_it(
    dispatcher: Dispatcher, fake: FakeExecutor, ends_with_steps: bool
) -> None:
    """An executor of an earlier release tells each end by itself. With its step it is in the last piece."""
    fake.ends_with_steps = ends_with_steps
    requests = [admitted(f"r{n}", max_new_tokens=n + 1) for n in range(4)]
    for request, live in [(each, dispatcher.submit(each, None)) for each in requests]:
        pieces = await read_all(live)
        assert tokens_in(pieces) == expected_tokens(request)
        assert pieces[-1].finish_reason == LENGTH
        assert pieces[-1].token_ids or not ends_with_steps
    assert not fake.cancelled


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
            busy = max(fakes, key=lambda fake: len(fake.running))
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


async def test_an_executor_moves_to_another_address_behind_its_name(tokenizer: Tokenizer) -> None:
    """The old address takes connections and says nothing: who dials it again never hears of anyone."""
    async with executors(1) as [old], name_server() as names:
        port = int(old.address.rpartition(":")[2])
        new = FakeExecutor(LINK.fingerprint)
        await new.start(port, host="127.0.0.2")
        names.put("executor.test", "A", ["127.0.0.1"])
        target = names.target("executor.test", port)
        async with running(dispatcher_of([target], tokenizer, link=IMPATIENT)) as dispatcher:
            await ready(dispatcher)
            request = admitted(max_new_tokens=60)
            reader = asyncio.create_task(read_all(live := dispatcher.submit(request, None)))
            await until(lambda: len(live.progress.output) > 3)
            names.put("executor.test", "A", ["127.0.0.2"])
            old.mute = True
            assert tokens_in(await reader) == expected_tokens(request)
        await new.stop()
        delivered = list(new.dispatches[0].output_token_ids)
        assert delivered == expected_tokens(request)[: len(delivered)] != []
        assert (len(old.dispatches), len(new.dispatches), old.streams) == (1, 1, 1)


async def test_an_executor_that_is_away_for_hours_comes_back(tokenizer: Tokenizer) -> None:
    async with (
        executors(1) as [fake],
        running(dispatcher_of([fake.address], tokenizer, link=IMPATIENT)) as dispatcher,
    ):
        await ready(dispatcher)
        fake.mute = True
        dispatcher.fleet._links[fake.address]._failures = 5000
        await until(lambda: not dispatcher.fleet.any_ready)
        fake.mute = False
        await ready(dispatcher)


async def test_a_hung_executor_loses_its_requests(tokenizer: Tokenizer) -> None:
    async with (
        executors(2) as fakes,
        running(dispatcher_of([fake.address for fake in fakes], tokenizer, link=IMPATIENT)) as dispatcher,
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


async def test_slow_steps_with_work_waiting_are_not_hung(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    """An executor that is merely busy keeps its stream and its requests."""
    slow = executor_pb2.Load(last_step_age_ms=60_000, running=8, waiting=500)
    fake.extra_events = [executor_pb2.ExecutorEvent(load=slow)] * 3
    await until(lambda: not fake.extra_events)
    assert tokens_in(await read_all(dispatcher.submit(admitted(), None))) == expected_tokens(admitted())
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


async def test_a_wall_clock_that_is_set_back_spoils_no_report(
    dispatcher: Dispatcher, fake: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.pages = True
    walls = itertools.count(2_000_000_000, -1000)
    monkeypatch.setattr("time.time", lambda: float(next(walls)))
    await read_all(dispatcher.submit(admitted(digest=DIGEST), None))
    state = dispatcher.fleet.states[0]
    await until(lambda: bool(state.usage.page_ins))
    [status] = snapshot(dispatcher.fleet, dispatcher.queue).executors
    assert status.page_in_max_ms < 60_000
    [row] = dispatcher.fleet.residency()
    assert 1_000_000_000_000 < row.last_use_ms <= 2_000_000_000_000


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
            [status] = snapshot(dispatcher.fleet, dispatcher.queue).executors
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


async def test_nobody_waits_for_ever_for_the_one_executor_that_can_hold_it(
    dispatcher: Dispatcher, fake: FakeExecutor, tokenizer: Tokenizer
) -> None:
    settings = replace(SETTINGS, queue_timeout_s=2.0)  # time to get there
    async with executors(1) as [large]:
        large.hello.max_rank = 64
        addresses = [fake.address, large.address]
        async with running(dispatcher_of(addresses, tokenizer, settings)) as fleet:
            await ready(fleet, 2)
            request = admitted(digest=DIGEST, max_rank=64, max_new_tokens=4000)
            reader = asyncio.create_task(read_all(live := fleet.submit(request, None)))
            await until(lambda: len(live.progress.output) > 3)
            await large.stop()
            with pytest.raises(NoExecutor, match="no executor is ready that can run it"):
                await reader
            assert fleet.fleet.any_ready


async def test_a_request_goes_only_where_its_whole_length_fits(tokenizer: Tokenizer) -> None:
    """It was admitted while the executor with less room was not there."""
    async with executors(2) as [short, long]:
        short.hello.max_model_len = 10
        async with running(dispatcher_of([short.address, long.address], tokenizer)) as dispatcher:
            await ready(dispatcher, 2)
            requests = [admitted(f"r{n}", max_new_tokens=20) for n in range(6)]
            for request in requests:
                assert len(tokens_in(await read_all(dispatcher.submit(request, None)))) == 20
            assert not short.dispatches
        async with running(dispatcher_of([short.address], tokenizer)) as dispatcher:
            await ready(dispatcher)
            with pytest.raises(NoExecutor, match="takes 23 tokens any more"):
                dispatcher.submit(admitted(max_new_tokens=20), None)


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
