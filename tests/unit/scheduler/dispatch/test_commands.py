"""What executors are told about versions: hints, who waits for a slot, pins and drops."""

from dataclasses import replace

import pytest

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.fleet.residency import Tier
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import (
    SETTINGS,
    admitted,
    dispatcher_of,
    executors,
    ready,
    running,
    until,
)

DIGEST = "sha256:" + "a" * 64


def prefetches(fake: FakeExecutor) -> list[executor_pb2.Prefetch]:
    return [command.prefetch for command in fake.commands if command.HasField("prefetch")]


async def test_hints_go_out_for_groups_without_room(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    fake.frozen = True
    lives = [dispatcher.submit(admitted(f"r{n}"), None) for n in range(8)]
    await until(lambda: len(fake.running) == 8)
    lives += [dispatcher.submit(admitted(f"a{n}", digest=DIGEST), None) for n in range(3)]
    await until(lambda: bool(prefetches(fake)))
    [hint] = prefetches(fake)
    assert (hint.digest, hint.expected_uses, hint.need_by_ms) == (DIGEST, 3, 0)  # a slot is free
    for live in lives:
        dispatcher.cancel(live)


@pytest.mark.parametrize("knows", [True, False])
async def test_the_end_of_a_wait_is_told_only_to_executors_that_know_of_waits(
    tokenizer: Tokenizer, knows: bool
) -> None:
    """Another would take it for a hint, and load what nobody waits for."""
    settings = replace(SETTINGS, aging_s=0.0, sweep_interval_s=0.01)
    async with executors(1) as [fake]:
        fake.hello.max_loras, fake.hello.knows_waits = 1, knows
        async with running(dispatcher_of([fake.address], tokenizer, settings)) as dispatcher:
            await ready(dispatcher)
            fake.frozen = True
            hot = dispatcher.submit(admitted("hot", digest="sha256:" + "b" * 64), None)
            await until(lambda: bool(fake.running))
            cold = dispatcher.submit(admitted("cold", digest=DIGEST), None)
            # A hint when it comes, and another word when it has a place in the line.
            await until(lambda: sum(told.digest == DIGEST for told in prefetches(fake)) == 2)
            dispatcher.cancel(cold)
            dispatcher.sweep()
            dispatcher.fleet.drop(DIGEST)  # Comes after all that was sent before.
            await until(lambda: any(command.HasField("drop") for command in fake.commands))
            told = [each for each in prefetches(fake) if each.digest == DIGEST]
            waits = [each.waiting_ms > 0 for each in told if each.lasts_ms]
            assert waits == ([True, False] if knows else [])
            assert all(each.expected_uses == 1 for each in told if not each.lasts_ms)
            dispatcher.cancel(hot)


async def test_dropping_reaches_who_is_connected(dispatcher: Dispatcher, fake: FakeExecutor) -> None:
    dispatcher.fleet.drop(DIGEST)
    await until(lambda: any(command.drop.digest == DIGEST for command in fake.commands))


async def test_a_drop_is_waited_for_on_its_stream_where_executors_answer(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    """Those of the version before do not."""
    fleet, port = dispatcher.fleet, int(fake.address.rpartition(":")[2])
    state = fleet.states[0]
    fake.pages, fake.loading = True, {DIGEST}
    fleet.drop(DIGEST)
    assert state.may_hold(DIGEST) and not state.may_hold("sha256:" + "b" * 64)
    await fake.stop()
    await until(lambda: state.limits is None)
    assert not state.may_hold(DIGEST), "its copies are told in the next hello"
    fake.hello.tells_drops = False
    await fake.start(port)
    await until(lambda: state.limits is not None)
    fleet.drop(DIGEST)
    assert not state.may_hold(DIGEST)


async def test_a_pin_that_ends_while_its_executor_is_cut_off_does_not_stay(
    dispatcher: Dispatcher, fake: FakeExecutor
) -> None:
    fake.pages = True
    fleet, port = dispatcher.fleet, int(fake.address.rpartition(":")[2])
    for adapter in ("acme/a", "acme/b", "acme/c"):
        fleet.pin(DIGEST, adapter, Tier.SLOT)
    await until(lambda: len(fake.pins.get(DIGEST, {})) == 3)
    await fake.stop()
    await until(lambda: fleet.states[0].limits is None)
    fleet.unpin(DIGEST, "acme/a")
    fleet.drop(DIGEST, "acme/b")
    await fake.start(port)
    await until(lambda: list(fake.pins[DIGEST]) == ["acme/c"])


async def test_pins_that_an_executor_does_not_keep_are_counted(tokenizer: Tokenizer) -> None:
    """By version, however many adapters pin it; who tells of no copy lacks it until the pins end."""
    async with executors(2) as [good, bad]:
        good.pages = True
        async with running(dispatcher_of([good.address, bad.address], tokenizer)) as dispatcher:
            await ready(dispatcher, 2)
            fleet = dispatcher.fleet

            def missing() -> list[int]:
                return [fleet.missing_pins()[each.address] for each in (good, bad)]

            for adapter in ("acme/a", "acme/b"):
                fleet.pin(DIGEST, adapter, Tier.SLOT)
            assert missing() == [1, 1]
            await until(lambda: missing() == [0, 1])
            fleet.unpin(DIGEST, "acme/a")
            await good.stop()
            await until(lambda: missing() == [1, 1])
            fleet.unpin(DIGEST, "acme/b")
            assert missing() == [0, 0]
