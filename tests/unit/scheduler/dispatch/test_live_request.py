"""What a client has not read yet."""

import pytest

from lorafleet.v1 import common_pb2
from scheduler.dispatch import live_request as requests
from scheduler.dispatch.live_request import MAX_PIECE_POSITIONS, Outbox, Piece
from scheduler.errors import NoExecutor
from scheduler.text.text_stream import TextDelta

TOKEN = common_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)
POSITION = common_pb2.PositionLogprobs(chosen=TOKEN, top=[TOKEN] * 20)


def put(outbox: Outbox, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        outbox.put(TextDelta((7,), "ab", stopped=False), [POSITION], now)


async def read(outbox: Outbox) -> list[Piece]:
    pieces = []
    while piece := await outbox.get():
        pieces.append(piece)
    return pieces


async def test_what_waits_is_one_piece_that_grows() -> None:
    outbox = Outbox(3, max_tokens=512)
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
    outbox = Outbox(0, max_tokens=10**9)
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
    outbox = Outbox(0, max_tokens=512)
    put(outbox, requests.MAX_PIECE_POSITIONS + 1)
    outbox.fail(NoExecutor("gone"))
    assert [len(piece.token_ids) for piece in [await outbox.get(), await outbox.get()] if piece] == [4096, 1]
    with pytest.raises(NoExecutor):
        await outbox.get()


async def test_it_is_full_until_a_piece_is_read() -> None:
    outbox = Outbox(0, max_tokens=10)
    put(outbox, 9, now=1.0)
    assert outbox.full_since is None
    put(outbox, 2, now=2.0)
    assert outbox.full_since == 2.0
    await outbox.get()
    assert outbox.full_since is None
