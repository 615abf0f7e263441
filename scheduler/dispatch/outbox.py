"""What a client has not read yet, and when its reader may have it."""

import asyncio
from collections import deque
from collections.abc import Sequence

from lorafleet.v1 import common_pb2, inference_pb2
from scheduler.dispatch.reader_line import ReaderLine
from scheduler.errors import SchedulerError
from scheduler.text.text_stream import TextDelta

# A message has at most 16 MiB. With 20 alternatives a token's log-probabilities take 276 bytes, so that these
# stay far below; those of a prompt are bounded at admission.
MAX_CHUNK_POSITIONS = 4096


class Outbox:
    """What a client has not read yet, in growing chunks: a slow client costs no more than its tokens.

    They are the messages that it gets, without what only the first and the last one have besides: the last
    has its `finish_reason`. So a token on its way is put into one object only.

    It has one reader, whom `pause` keeps waiting though there are tokens, so that they come as one chunk. The
    end of an answer, good or bad, ends the pause.
    """

    def __init__(self, output_index: int, line: ReaderLine) -> None:
        """`line` tells its reader, among those of other outboxes, when to take what is there."""
        self._line = line
        self._loop = asyncio.get_running_loop()  # Asked for once: that takes a call of the system.
        self._end = output_index  # Of the tokens that it was given.
        self._chunks = deque[inference_pb2.GenerateChunk]()  # None of them is empty; the last one grows.
        # What its text gets before it is read. A message that gets it bit by bit copies all of it each time.
        self._texts: list[str] = []
        self.error: SchedulerError | None = None  # Why it failed, if it did.
        self._read_all = False
        self._reader: asyncio.Future[None] | None = None  # That waits, but not in the line.
        self._pause: asyncio.TimerHandle | None = None

    def put(self, delta: TextDelta, logprobs: Sequence[common_pb2.PositionLogprobs] = ()) -> None:
        if not (delta.token_ids or delta.text):
            return
        if self._chunks and _num_positions(self._chunks[-1]) < MAX_CHUNK_POSITIONS:
            chunk = self._chunks[-1]
            chunk.token_ids.extend(delta.token_ids)
            self._texts.append(delta.text)
        else:
            self._complete_text()
            chunk = inference_pb2.GenerateChunk(
                output_index=self._end, token_ids=delta.token_ids, text=delta.text
            )
            self._chunks.append(chunk)
        self._end += len(delta.token_ids)
        if logprobs:
            chunk.logprobs.extend(logprobs)
        if self._pause is None:
            self._wake()

    def put_prompt_logprobs(self, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        """They leave with the tokens that follow."""
        self._last().prompt_logprobs.extend(logprobs)

    def finish(self, reason: common_pb2.FinishReason) -> None:
        self._last().finish_reason = reason
        self._end_pause()

    def fail(self, error: SchedulerError) -> None:
        self.error = error
        self._end_pause()

    def pause(self, seconds: float) -> None:
        """Keeps the next chunk back for so long, unless the answer is at its end."""
        if not self._at_end:
            self._pause = self._loop.call_later(seconds, self._end_pause)

    def close(self) -> None:
        """The reader is gone: nothing waits for the end of a pause."""
        self._end_pause()

    async def get(self) -> inference_pb2.GenerateChunk | None:
        """The next chunk, None after the last; raises what the request failed with, after its tokens."""
        if self._read_all:
            return None
        while True:
            self._reader = reader = self._loop.create_future()
            if not self._pause and (self.error or self._chunks):
                self._wake()
            await reader
            if self._chunks:
                break
            if self.error:
                raise self.error
        if len(self._chunks) == 1:
            self._complete_text()
        chunk = self._chunks.popleft()
        self._read_all = bool(chunk.finish_reason)
        return chunk

    @property
    def _at_end(self) -> bool:
        return bool(self.error or self._read_all or (self._chunks and self._chunks[-1].finish_reason))

    def _last(self) -> inference_pb2.GenerateChunk:
        if not self._chunks:
            self._chunks.append(inference_pb2.GenerateChunk(output_index=self._end))
        return self._chunks[-1]

    def _complete_text(self) -> None:
        """Of the last chunk, which grows no more."""
        if self._texts:
            self._chunks[-1].text += "".join(self._texts)
            self._texts.clear()

    def _end_pause(self) -> None:
        if self._pause:
            self._pause.cancel()
            self._pause = None
        self._wake()

    def _wake(self) -> None:
        if self._reader:
            self._line.join(self._reader)
            self._reader = None


def _num_positions(chunk: inference_pb2.GenerateChunk) -> int:
    return len(chunk.token_ids) + len(chunk.prompt_logprobs)
