"""Adapters that one executor can never load: another is asked, or the client gets the cause."""

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.placement.rendezvous import Rendezvous
from scheduler.errors import ExecutorFailed, InternalError
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
    until,
)

DIGEST = "sha256:" + "a" * 64
REFUSALS = [
    ("ADAPTER_NOT_FOUND", grpc.StatusCode.NOT_FOUND),
    ("DATA_LOSS", grpc.StatusCode.DATA_LOSS),
    ("INCOMPATIBLE_ADAPTER", grpc.StatusCode.FAILED_PRECONDITION),
    ("INVALID_LOGITS", grpc.StatusCode.FAILED_PRECONDITION),
]


def refuse_adapters(fake: FakeExecutor, reason: str, code: grpc.StatusCode) -> None:
    def reject(dispatch: executor_pb2.Dispatch) -> executor_pb2.Rejected | None:
        number: int = code.value[0]
        message = f"{fake.address} cannot load it"
        return executor_pb2.Rejected(reason=reason, message=message, code=number) if dispatch.digest else None

    fake.reject = reject


@pytest.fixture
async def two() -> AsyncIterator[list[FakeExecutor]]:
    """First the one that gets a version nobody has, its home; it has more seats, too."""
    async with executors(2) as fakes:
        if Rendezvous([fake.address for fake in fakes], [1.0, 1.0]).order(DIGEST)[0]:
            fakes.reverse()
        fakes[0].hello.max_seats = 12
        yield fakes


@pytest.fixture
async def fleet(two: list[FakeExecutor], tokenizer: Tokenizer) -> AsyncIterator[Dispatcher]:
    async with running(dispatcher_of([fake.address for fake in two], tokenizer)) as dispatcher:
        await ready(dispatcher, 2)
        yield dispatcher


@pytest.mark.parametrize(("reason", "code"), REFUSALS)
async def test_another_executor_is_asked(
    fleet: Dispatcher, two: list[FakeExecutor], reason: str, code: grpc.StatusCode
) -> None:
    """Whatever is wrong with one executor's store, cache or form costs no request."""
    refuse_adapters(two[0], reason, code)
    lives = [fleet.submit(admitted(f"r{n}", digest=DIGEST), None) for n in range(6)]
    for live in lives:
        assert tokens_in(await read_all(live)) == expected_tokens(live.admitted)
    assert two[0].dispatches, "nothing was tried"
    assert len(two[1].dispatches) == 6


@pytest.mark.parametrize(("reason", "code"), REFUSALS)
async def test_each_is_asked_once_and_the_last_ones_cause_is_the_answer(
    fleet: Dispatcher, two: list[FakeExecutor], reason: str, code: grpc.StatusCode
) -> None:
    for fake in two:
        refuse_adapters(fake, reason, code)
    with pytest.raises(ExecutorFailed, match=f"{two[1].address} cannot load it") as caught:
        await read_all(fleet.submit(admitted(digest=DIGEST), None))
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert caught.value.metadata == {"adapter": "acme/adapter", "digest": DIGEST}
    assert [len(fake.dispatches) for fake in two] == [1, 1]


async def test_a_base_that_overflows_on_one_executor_is_asked_of_another(
    fleet: Dispatcher, two: list[FakeExecutor]
) -> None:
    """It may compute in a wider dtype."""
    code: int = grpc.StatusCode.FAILED_PRECONDITION.value[0]
    two[0].reject = lambda dispatch: executor_pb2.Rejected(reason="INVALID_LOGITS", code=code)
    lives = [fleet.submit(admitted(f"r{n}"), None) for n in range(6)]
    for live in lives:
        assert tokens_in(await read_all(live)) == expected_tokens(live.admitted)
    assert two[0].dispatches, "nothing was tried"


@pytest.mark.parametrize("number", [0, 99])
async def test_a_status_that_is_none_is_a_bug_with_an_id_in_the_log(
    fleet: Dispatcher, two: list[FakeExecutor], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    for fake in two:
        fake.reject = lambda dispatch: executor_pb2.Rejected(reason="NEW", message="of its own", code=number)
    with pytest.raises(InternalError) as caught:
        await read_all(fleet.submit(admitted(), None))
    [told] = [record for record in caplog.records if caught.value.metadata["error_id"] in record.message]
    assert told.exc_info and "NEW: of its own" in str(told.exc_info[1])


async def test_damage_is_told_once_a_request(two: list[FakeExecutor], tokenizer: Tokenizer) -> None:
    """Whoever is told hashes all bytes of the version."""
    told: list[tuple[str, str]] = []
    for fake in two:
        refuse_adapters(fake, *REFUSALS[1])
    addresses = [fake.address for fake in two]
    dispatcher = dispatcher_of(addresses, tokenizer, data_loss=lambda *version: told.append(version))
    async with running(dispatcher):
        await ready(dispatcher, 2)
        live = dispatcher.submit(admitted(digest=DIGEST), None)
        with pytest.raises(ExecutorFailed):
            await read_all(live)
    assert told == [(live.admitted.adapter, DIGEST)]


async def test_another_executor_that_comes_back_is_waited_for(
    fleet: Dispatcher, two: list[FakeExecutor]
) -> None:
    refuse_adapters(two[0], *REFUSALS[0])
    two[1].load_state = executor_pb2.LOAD_STATE_DRAINING
    await until(lambda: sum(state.takes_requests for state in fleet.fleet.states) == 1)
    live = fleet.submit(admitted(digest=DIGEST), None)
    await until(lambda: bool(live.waiting.refused) and not live.dispatch_id)
    two[1].load_state = executor_pb2.LOAD_STATE_READY
    assert tokens_in(await read_all(live)) == expected_tokens(live.admitted)


@pytest.mark.parametrize("leave", ["drain", "cordon"])
async def test_nobody_is_waited_for_longer_than_for_any_executor(
    two: list[FakeExecutor], tokenizer: Tokenizer, leave: str
) -> None:
    """The answer is then what the one executor said."""
    refuse_adapters(two[0], *REFUSALS[0])
    settings = replace(SETTINGS, queue_timeout_s=0.5)
    async with running(dispatcher_of([fake.address for fake in two], tokenizer, settings)) as fleet:
        await ready(fleet, 2)
        if leave == "drain":
            two[1].load_state = executor_pb2.LOAD_STATE_DRAINING
        else:
            (state,) = (state for state in fleet.fleet.states if state.address == two[1].address)
            state.cordoned = True
        await until(lambda: sum(state.takes_requests for state in fleet.fleet.states) == 1)
        with pytest.raises(ExecutorFailed, match=f"{two[0].address} cannot load it"):
            await read_all(fleet.submit(admitted(digest=DIGEST), None))
