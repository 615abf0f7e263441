"""What a client has not read yet, and when its reader may have it."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lorafleet.v1 import common_pb2
from scheduler.dispatch.reader_line import ReaderLine
from scheduler.errors import SchedulerError
from scheduler.text.text_stream import TextDelta

# A piece becomes one message of at most 16 MiB. With 20 alternatives a token's log-probabilities take 276
# bytes, so that of these stays far below; those of a prompt are bounded at admission.
MAX_PIECE_POSITIONS = 4096
UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(slots=True)
class Piece:
    """A piece of an answer, as a client reads it. `finish` is set in the last one."""

    output_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finish: common_pb2.FinishReason = UNFINISHED

    @property
    def num_positions(self) -> int:
        return len(self.token_ids) + len(self.prompt_logprobs)


class Outbox:
    """What a client has not read yet, in growing pieces: a slow client costs no more than its tokens.

    It has one reader, whom `pause` keeps waiting though there are tokens, so that they come as one piece. The
    end of an answer, good or bad, ends the pause.
    """

    def __init__(self, output_index: int, line: ReaderLine) -> None:
        """`line` tells its reader, among those of other outboxes, when to take what is there."""
        self._line = line
        self._loop = asyncio.get_running_loop()  # Asked for once: that takes a call of the system.
        self._end = output_index  # Of the tokens that it was given.
        self._pieces = deque[Piece]()  # None of them is empty; the last one grows.
        self.error: SchedulerError | None = None  # Why it failed, if it did.
        self._read_all = False
        self._reader: asyncio.Future[None] | None = None  # That waits, but not in the line.
        self._pause: asyncio.TimerHandle | None = None

    def put(self, delta: TextDelta, logprobs: Sequence[common_pb2.PositionLogprobs] = ()) -> None:
        if not (delta.token_ids or delta.text):
            return
        if self._pieces and self._pieces[-1].num_positions < MAX_PIECE_POSITIONS:
            piece = self._pieces[-1]
            piece.token_ids += delta.token_ids
            piece.text += delta.text
        else:
            piece = Piece(self._end, list(delta.token_ids), delta.text)
            self._pieces.append(piece)
        self._end += len(delta.token_ids)
        if logprobs:
            piece.logprobs += logprobs
        if self._pause is None:
            self._wake()

    def put_prompt_logprobs(self, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        """They leave with the tokens that follow."""
        self._last().prompt_logprobs.extend(logprobs)

    def finish(self, reason: common_pb2.FinishReason) -> None:
        self._last().finish = reason
        self._end_pause()

    def fail(self, error: SchedulerError) -> None:
        self.error = error
        self._end_pause()

    def pause(self, seconds: float) -> None:
        """Keeps the next piece back for so long, unless the answer is at its end."""
        if not self._at_end:
            self._pause = self._loop.call_later(seconds, self._end_pause)

    def close(self) -> None:
        """The reader is gone: nothing waits for the end of a pause."""
        self._end_pause()

    async def get(self) -> Piece | None:
        """The next piece, None after the last; raises what the request failed with, after its tokens."""
        if self._read_all:
            return None
        while True:
            self._reader = reader = self._loop.create_future()
            if not self._pause and (self.error or self._pieces):
                self._wake()
            await reader
            if self._pieces:
                break
            if self.error:
                raise self.error
        piece = self._pieces.popleft()
        self._read_all = bool(piece.finish)
        return piece

    @property
    def _at_end(self) -> bool:
        return bool(self.error or self._read_all or (self._pieces and self._pieces[-1].finish))

    def _last(self) -> Piece:
        if not self._pieces:
            self._pieces.append(Piece(self._end))
        return self._pieces[-1]

    def _end_pause(self) -> None:
        if self._pause:
            self._pause.cancel()
            self._pause = None
        self._wake()

    def _wake(self) -> None:
        if self._reader:
            self._line.join(self._reader)
            self._reader = None
