import asyncio

from executor.outbox import Outbox
from lorafleet.v1.executor_pb2 import ExecutorEvent, Load


def event(number: int) -> ExecutorEvent:
    return ExecutorEvent(load=Load(running=number))


async def test_events_come_in_order_and_none_after_the_end() -> None:
    outbox = Outbox(4)
    getting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    for number in range(3):
        outbox.put(event(number))
    outbox.close()
    outbox.put(event(9))
    assert await getting == event(0)
    assert [await outbox.get() for _ in range(3)] == [event(1), event(2), None]


async def test_nothing_is_lost_when_it_is_full() -> None:
    outbox = Outbox(2)
    for number in range(5):
        outbox.put(event(number))
    assert outbox.full and len(outbox) == 5
    assert await outbox.get() == event(0)


async def test_only_a_lasting_jam_is_overdue() -> None:
    outbox = Outbox(1)
    outbox.put(event(0))
    assert not outbox.overdue(0.0, 10.0)
    assert not outbox.overdue(9.9, 10.0)
    await outbox.get()
    assert not outbox.overdue(10.0, 10.0)
    outbox.put(event(1))
    assert not outbox.overdue(11.0, 10.0)
    assert outbox.overdue(21.0, 10.0)


async def test_a_discarded_outbox_ends_at_once() -> None:
    outbox = Outbox(4)
    outbox.put(event(0))
    outbox.discard()
    assert await outbox.get() is None
