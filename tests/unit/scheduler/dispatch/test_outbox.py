"""What a client has not read yet."""

import asyncio
from collections.abc import Sequence

import pytest

from lorafleet.v1 import common_pb2, inference_pb2
from lorafleet.v1.inference_pb2 import GenerateChunk
from scheduler.dispatch.outbox import MAX_CHUNK_POSITIONS, Outbox
from scheduler.dispatch.reader_line import ReaderLine
from scheduler.errors import NoExecutor
from scheduler.text.text_stream import TextDelta

TOKEN = common_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.5)
POSITION = common_pb2.PositionLogprobs(chosen=TOKEN, top=[TOKEN] * 20)


def put(outbox: Outbox, count: int) -> None:
    for _ in range(count):
        outbox.put(TextDelta((7,), "ab", stopped=False), [POSITION])


async def read(outbox: Outbox) -> list[GenerateChunk]:
    chunks = []
    while chunk := await outbox.get():
        chunks.append(chunk)
    return chunks


async def test_what_waits_is_one_chunk_that_grows() -> None:
    outbox = Outbox(3, ReaderLine())
    put(outbox, 5)
    chunk = await outbox.get()
    assert chunk is not None
    assert (chunk.output_index, chunk.token_ids, chunk.text) == (3, [7] * 5, "ab" * 5)
    put(outbox, 2)
    outbox.finish(common_pb2.FINISH_REASON_STOP)
    [chunk] = await read(outbox)
    assert (chunk.output_index, len(chunk.logprobs)) == (8, 2)
    assert await outbox.get() is None


@pytest.mark.parametrize("prompt", [0, 100, MAX_CHUNK_POSITIONS, 3 * MAX_CHUNK_POSITIONS])
async def test_chunks_stay_small_whatever_waits(prompt: int) -> None:
    """A client that reads nothing for 10,000 tokens still gets messages far below the limit."""
    outbox = Outbox(0, ReaderLine())
    outbox.put_prompt_logprobs([POSITION] * prompt)
    put(outbox, 10_000)
    outbox.finish(common_pb2.FINISH_REASON_LENGTH)
    chunks = await read(outbox)
    assert sum(len(chunk.prompt_logprobs) for chunk in chunks) == len(chunks[0].prompt_logprobs) == prompt
    assert max(len(chunk.token_ids) for chunk in chunks) <= MAX_CHUNK_POSITIONS
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    tokens = 0
    for chunk in chunks:
        assert (chunk.output_index, chunk.text) == (tokens, "ab" * len(chunk.token_ids))
        tokens += len(chunk.token_ids)
    assert tokens == 10_000


class CountedChunk:
    """A message that counts what is written to its text: each time, a real one takes all of it anew."""

    written = 0

    def __init__(self, output_index: int, token_ids: Sequence[int], text: str) -> None:
        self.output_index, self.token_ids, self.text = output_index, list(token_ids), text
        self.prompt_logprobs: list[common_pb2.PositionLogprobs] = []
        self.finish_reason = 0

    def __setattr__(self, name: str, value: object) -> None:
        if name == "text":
            CountedChunk.written += len(str(value))
        super().__setattr__(name, value)


async def test_a_client_that_reads_nothing_costs_no_more_than_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inference_pb2, "GenerateChunk", CountedChunk)
    monkeypatch.setattr(CountedChunk, "written", 0)
    outbox = Outbox(0, ReaderLine())
    for _ in range(10_000):
        outbox.put(TextDelta((7,), "ab"))
    outbox.finish(common_pb2.FINISH_REASON_LENGTH)
    assert "".join(chunk.text for chunk in await read(outbox)) == "ab" * 10_000
    assert CountedChunk.written < 2 * len("ab") * 10_000


async def test_a_failure_comes_after_what_was_made_before_it() -> None:
    outbox = Outbox(0, ReaderLine())
    put(outbox, MAX_CHUNK_POSITIONS + 1)
    outbox.fail(NoExecutor("gone"))
    assert [len(chunk.token_ids) for chunk in [await outbox.get(), await outbox.get()] if chunk] == [4096, 1]
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
    chunk = await reading
    assert chunk is not None and chunk.token_ids == [7] * 3


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
        chunk = await outbox.get()
        assert chunk is not None and chunk.token_ids == [7]
        if error:
            with pytest.raises(NoExecutor):
                await outbox.get()
        else:
            outbox.pause(3600)
            assert chunk.finish_reason and await outbox.get() is None
        assert outbox._pause is None
