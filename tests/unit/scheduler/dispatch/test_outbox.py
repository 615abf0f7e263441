"""What a client has not read yet."""

import asyncio

import pytest

from lorafleet.v1 import common_pb2
from scheduler.dispatch.outbox import MAX_PIECE_POSITIONS, Outbox, Piece
from scheduler.dispatch.reader_line import ReaderLine
from scheduler.errors import NoExecutor
from scheduler.text.text_stream import TextDelta

TOKEN = common_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)
POSITION = common_pb2.PositionLogprobs(chosen=TOKEN, top=[TOKEN] * 20)


def put(outbox: Outbox, count: int) -> None:
    for _ in range(count):
        outbox.put(TextDelta((7,), "ab", stopped=False), [POSITION])


async def read(outbox: Outbox) -> list[Piece]:
    pieces = []
    while piece := await outbox.get():
        pieces.append(piece)
    return pieces


async def test_what_waits_is_one_piece_that_grows() -> None:
    outbox = Outbox(3, ReaderLine())
    put(outbox, 5)
    piece = await outbox.get()
    assert piece is not None
    assert (piece.output_index, piece.token_ids, piece.text) == (3, [7] * 5, "ab" * 5)
    put(outbox, 2)
    outbox.finish(common_pb2.FINISH_REASON_STOP)
    [piece] = await read(outbox)
    assert (piece.output_index, len(piece.logprobs)) == (8, 2)
    assert await outbox.get() is None


@pytest.mark.parametrize("prompt", [0, 100, MAX_PIECE_POSITIONS, 3 * MAX_PIECE_POSITIONS])
async def test_pieces_stay_small_whatever_waits(prompt: int) -> None:
    """A client that reads nothing for 10,000 tokens still gets messages far below the limit."""
    outbox = Outbox(0, ReaderLine())
    outbox.put_prompt_logprobs([POSITION] * prompt)
    put(outbox, 10_000)
    outbox.finish(common_pb2.FINISH_REASON_LENGTH)
    pieces = await read(outbox)
    assert sum(len(piece.prompt_logprobs) for piece in pieces) == len(pieces[0].prompt_logprobs) == prompt
    assert max(len(piece.token_ids) for piece in pieces) <= MAX_PIECE_POSITIONS
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert [bool(piece.finish) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    tokens = 0
    for piece in pieces:
        assert (piece.output_index, piece.text) == (tokens, "ab" * len(piece.token_ids))
        tokens += len(piece.token_ids)
    assert tokens == 10_000


async def test_a_failure_comes_after_what_was_made_before_it() -> None:
    outbox = Outbox(0, ReaderLine())
    put(outbox, MAX_PIECE_POSITIONS + 1)
    outbox.fail(NoExecutor("gone"))
    assert [len(piece.token_ids) for piece in [await outbox.get(), await outbox.get()] if piece] == [4096, 1]
    with pytest.raises(NoExecutor):
        await outbox.get()


async def test_a_pause_gathers_what_comes_meanwhile() -> None:
    outbox = Outbox(0, ReaderLine())
    put(outbox, 1)
    assert await outbox.get()
    outbox.pause(0.02)
    reading = asyncio.create_task(outbox.get())
    put(outbox, 1)
    await asyncio.sleep(0)
    put(outbox, 2)
    await asyncio.sleep(0)
    assert not reading.done()
    piece = await reading
    assert piece is not None and piece.token_ids == [7] * 3


@pytest.mark.parametrize("begin", ["before", "during"])
async def test_the_end_of_an_answer_ends_a_pause(begin: str) -> None:
    """An hour's; and none begins when the end is there."""
    for error in (None, NoExecutor("gone")):
        outbox = Outbox(0, ReaderLine())
        put(outbox, 1)
        if begin == "during":
            outbox.pause(3600)
        outbox.fail(error) if error else outbox.finish(common_pb2.FINISH_REASON_STOP)
        outbox.pause(3600)
        piece = await outbox.get()
        assert piece is not None and piece.token_ids == [7]
        if error:
            with pytest.raises(NoExecutor):
                await outbox.get()
        else:
            outbox.pause(3600)
            assert piece.finish and await outbox.get() is None
        assert outbox._pause is None
