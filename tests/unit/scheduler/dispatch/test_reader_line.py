"""Readers of many outboxes take turns, and leave the event loop to others in between."""

import asyncio
from itertools import pairwise

from scheduler.dispatch.outbox import Outbox
from scheduler.dispatch.reader_line import READERS_A_TURN, ReaderLine
from scheduler.text.text_stream import TextDelta

READERS = 10 * READERS_A_TURN


def put(outboxes: list[Outbox]) -> None:
    for outbox in outboxes:
        outbox.put(TextDelta((7,), "a", stopped=False))


async def test_a_turn_of_the_loop_has_few_readers_however_many_are_ready() -> None:
    line, read = ReaderLine(), list[int]()
    outboxes = [Outbox(0, line) for _ in range(READERS)]

    async def read_one(number: int) -> None:
        await outboxes[number].get()
        read.append(number)

    readers = [asyncio.create_task(read_one(number)) for number in range(READERS)]
    await asyncio.sleep(0)
    put(outboxes)
    done = [0]
    while done[-1] < READERS:
        await asyncio.sleep(0)
        done.append(len(read))
    assert max(after - before for before, after in pairwise(done)) == READERS_A_TURN
    assert read == list(range(READERS))
    await asyncio.gather(*readers)


async def test_who_stands_in_the_line_gathers_and_the_line_tells_how_long() -> None:
    line = ReaderLine()
    outboxes = [Outbox(0, line) for _ in range(READERS)]
    readers = [asyncio.create_task(outbox.get()) for outbox in outboxes]
    await asyncio.sleep(0)
    assert line.waited_s() == 0
    put(outboxes)
    assert line.waited_s() > 0
    put(outboxes)
    pieces = await asyncio.gather(*readers)
    assert [piece and len(piece.token_ids) for piece in pieces] == [2] * READERS
    assert line.waited_s() == 0


async def test_a_reader_that_went_away_in_the_line_holds_nobody_up() -> None:
    line = ReaderLine()
    outboxes = [Outbox(0, line) for _ in range(READERS)]
    readers = [asyncio.create_task(outbox.get()) for outbox in outboxes]
    await asyncio.sleep(0)
    put(outboxes)
    for reader in readers[:-1]:
        reader.cancel()
    piece = await readers[-1]
    assert piece and piece.token_ids == [7]
