"""How many messages are read at once, and of one caller."""

import asyncio

import pytest

from lorafleet.doors.refusals import TooManyMessages
from lorafleet.doors.turns import ShortTurns, Turns


def waiting(turns: Turns, *callers: str) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(turns.take(caller)) for caller in callers]


async def test_one_caller_has_half_of_the_turns_and_all_together_all() -> None:
    turns = Turns(4)
    mine = waiting(turns, "a", "a", "a")
    await asyncio.sleep(0)
    assert [each.done() for each in mine] == [True, True, False]
    theirs = waiting(turns, "b", "b", "c")
    await asyncio.sleep(0)
    assert [each.done() for each in theirs] == [True, True, False]
    turns.give_back("b")
    turns.give_back("a")
    turns.give_back("a")
    await asyncio.gather(*mine, *theirs)
    assert turns.num_waiting == 0


async def test_callers_who_wait_come_in_turn_and_the_first_of_each_first() -> None:
    turns, order = Turns(2), list[str]()
    await asyncio.gather(turns.take("x"), turns.take("y"))

    async def come(name: str) -> None:
        await turns.take(name[0])
        order.append(name)
        turns.give_back(name[0])

    tasks = [asyncio.create_task(come(name)) for name in ("a1", "a2", "a3", "b1")]
    await asyncio.sleep(0)
    turns.give_back("x")
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "a2", "a3"]


async def test_a_long_line_that_moves_is_waited_in() -> None:
    turns = Turns(2, wait_s=0.1)
    await turns.take("a")
    line = waiting(turns, *["a"] * 8)
    for _ in line:
        await asyncio.sleep(0.06)
        turns.give_back("a")
    await asyncio.gather(*line)


async def test_who_waits_in_vain_or_leaves_takes_nothing() -> None:
    turns = Turns(2, max_waiting=2, wait_s=0.01)
    await turns.take("a")
    tasks = waiting(turns, "a", "a", "a")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in results] == [TooManyMessages] * 3
    patient = Turns(2, wait_s=600)
    await patient.take("a")
    [task] = waiting(patient, "a")
    await asyncio.sleep(0)
    patient.give_back("a")  # Both at once: the turn comes, and its taker goes.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*waiting(patient, "a", "b"))


async def test_who_waited_in_vain_has_a_turn_when_it_comes_as_it_was_told() -> None:
    """Though nobody has ended meanwhile, and before others of the same caller."""
    turns = Turns(4, wait_s=0.01)
    await asyncio.gather(turns.take("a"), turns.take("a"))
    with pytest.raises(TooManyMessages) as caught:
        await turns.take("a", "mine")
    await asyncio.sleep(caught.value.retry_after_s or 0.0)
    with pytest.raises(TooManyMessages):
        await turns.take("a", "another's")
    await turns.take("a", "mine")


async def test_one_caller_has_half_of_the_line() -> None:
    turns = Turns(2, max_waiting=4, wait_s=600)
    await asyncio.gather(turns.take("a"), turns.take("b"))
    mine, others = waiting(turns, "a", "a", "a"), waiting(turns, "b")
    await asyncio.sleep(0)
    with pytest.raises(TooManyMessages):
        await mine.pop()
    turns.give_back("b")
    await asyncio.gather(*others)
    turns.give_back("a")
    turns.give_back("b")
    await mine[0]
    mine[1].cancel()


class Line:
    """Calls that wait for short turns, and those that had one, in their order."""

    def __init__(self, turns: ShortTurns) -> None:
        self.had, self.refused = list[str](), list[str]()
        self.told_s = 0.0
        self._turns = turns

    async def come(self, *names: str) -> asyncio.Task[None]:
        """All of them wait, or read. The first letter is their caller's."""
        tasks = [asyncio.create_task(self._read(name)) for name in names]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks[0]

    async def _read(self, name: str) -> None:
        try:
            async with asyncio.timeout(None) as reading:
                try:
                    await self._turns.begin(name[0], reading)
                    self.had.append(name)
                    await asyncio.sleep(3600 if name == "silent" else 0)
                finally:
                    self._turns.end(reading)
        except TooManyMessages as error:
            self.told_s = error.retry_after_s or 0.0
            self.refused.append(name)
        except TimeoutError:
            """It gave way."""


async def test_callers_of_short_messages_come_in_turn_and_the_newest_of_each_first() -> None:
    turns = ShortTurns(1)
    line = Line(turns)
    first = await line.come("silent")
    await line.come("a1", "a2", "a3", "b1", "b2")
    first.cancel()
    while turns.num_waiting:
        await asyncio.sleep(0)
    assert line.had == ["silent", "a3", "b2", "a2", "b1", "a1"] and not line.refused


async def test_who_has_most_calls_waiting_loses_the_oldest_of_them() -> None:
    turns = ShortTurns(1, max_waiting=3)
    line = Line(turns)
    first = await line.come("silent")
    await line.come("b1", "a1", "a2", "a3", "a4")
    assert line.refused == ["a1", "a2"]
    first.cancel()
    while turns.num_waiting:
        await asyncio.sleep(0)
    assert sorted(line.had) == ["a3", "a4", "b1", "silent"]


async def test_who_is_refused_a_short_turn_has_one_when_it_comes_as_it_was_told() -> None:
    turns = ShortTurns(1, max_waiting=3)
    line = Line(turns)
    first = await line.come("silent")
    await line.come("a1", "a2", "b1", "a3")
    assert line.refused == ["a1"]
    await asyncio.sleep(line.told_s)
    await line.come("a1")
    assert line.refused == ["a1"] and "a1" in line.had
    first.cancel()
