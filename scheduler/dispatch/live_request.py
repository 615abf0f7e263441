"""One accepted request: its place in the queue, its progress, and what its client has yet to read."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lorafleet.v1 import common_pb2
from scheduler.admission.admission import AdmittedRequest
from scheduler.dispatch.progress import Progress
from scheduler.dispatch.queue import Waiting
from scheduler.errors import SchedulerError
from scheduler.text.text_stream import TextDelta, TextStream
from scheduler.text.tokenizer import Tokenizer

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

    `max_tokens` is not a limit to what it holds (a request's own length is) but when it counts as full; the
    owner looks at `full_since` and gives a client up that lets it stay full.
    """

    def __init__(self, output_index: int, max_tokens: int) -> None:
        self._pieces = deque([Piece(output_index)])  # Never empty; the last one grows.
        self._unread_tokens = 0
        self._max_tokens = max_tokens
        self.error: SchedulerError | None = None  # Why it failed, if it did.
        self._changed = asyncio.Event()
        self._read_all = False
        self.full_since: float | None = None

    def put(self, delta: TextDelta, logprobs: Sequence[common_pb2.PositionLogprobs], now: float) -> None:
        piece = self._pieces[-1]
        if piece.num_positions >= MAX_PIECE_POSITIONS:
            piece = Piece(piece.output_index + len(piece.token_ids))
            self._pieces.append(piece)
        piece.token_ids.extend(delta.token_ids)
        piece.text += delta.text
        piece.logprobs.extend(logprobs)
        self._unread_tokens += len(delta.token_ids)
        if self._unread_tokens >= self._max_tokens and self.full_since is None:
            self.full_since = now
        self._changed.set()

    def put_prompt_logprobs(self, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        self._pieces[-1].prompt_logprobs.extend(logprobs)

    def finish(self, reason: common_pb2.FinishReason) -> None:
        self._pieces[-1].finish = reason
        self._changed.set()

    def fail(self, error: SchedulerError) -> None:
        self.error = error
        self._changed.set()

    async def get(self) -> Piece | None:
        """The next piece, None after the last; raises what the request failed with, after its tokens."""
        while not self._read_all:
            await self._changed.wait()
            self._changed.clear()
            piece = self._pieces[0]
            if not (piece.num_positions or piece.text or piece.finish):
                if self.error:
                    raise self.error
                continue
            self._remove_first()
            self._read_all = bool(piece.finish)
            return piece
        return None

    def _remove_first(self) -> None:
        piece = self._pieces.popleft()
        self._unread_tokens -= len(piece.token_ids)
        self.full_since = None
        if self._pieces or self.error:
            self._changed.set()
        if not self._pieces:
            self._pieces.append(Piece(piece.output_index + len(piece.token_ids)))


class LiveRequest:
    """Accepted and not ended. The dispatcher alone changes it; its server handler reads `outbox`."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        number: int,
        tokenizer: Tokenizer,
        now: float,
        max_outbox_tokens: int,
    ) -> None:
        self.admitted = admitted
        self.waiting = Waiting(
            number=number,
            tenant=admitted.identity.tenant,
            digest=admitted.digest,
            priority=admitted.priority,
            cost=len(admitted.prompt_token_ids),
            max_rank=admitted.max_rank,
            modules=admitted.modules,
            full_heads=admitted.full_heads,
            max_length=len(admitted.prompt_token_ids) + admitted.stopping.max_new_tokens,
            arrived=now,
        )
        stopping = admitted.stopping
        own_ends = frozenset() if stopping.ignore_eos else tokenizer.eos_token_ids
        self.progress = Progress(admitted, own_ends | frozenset(stopping.stop_token_ids))
        self.text = TextStream(
            tokenizer,
            admitted.prompt_token_ids,
            stopping.stop_sequences,
            admitted.resumed_token_ids,
            silent_token_ids=stopping.stop_token_ids,
        )
        self.outbox = Outbox(len(admitted.resumed_token_ids), max_outbox_tokens)
        self.accepted_at = now
        self.served_at = now  # When it last ran, or an executor was ready that can run it, busy or not; on
        # the dispatcher's clock for waiting on others, as is `now` in `push` and `flush`.
        self.last_token_at: float | None = None
        self.dispatch_id = ""  # Of the attempt that runs; empty while it waits.
        self.address = ""  # Where it runs.
        self.attempts = 0
        self.failures = 0  # Attempts in a row that failed before their first token.
        self.proven = False  # Whether the attempt that runs, or the last one, has had a token.
        self.crashes = 0  # Executors in a row that were lost while it ran there unproven.
        self.refusal: SchedulerError | None = None  # Of the last executor that cannot serve it.
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None  # Of its deadline or time limit.
        self.pause: asyncio.TimerHandle | None = None  # Until it goes back to the queue.
        self.hang_up: Callable[[], object] = _nothing  # Ends the write to a client that does not read.
        self.completion_tokens = len(admitted.resumed_token_ids)
        self.cached_prompt_tokens = 0
        self._held_logprobs: deque[common_pb2.PositionLogprobs] = deque()

    @property
    def key(self) -> tuple[str, str]:
        """Unique among live requests."""
        return (self.admitted.identity.tenant, self.admitted.request_id)

    def time_limit_left_s(self, now: float) -> float | None:
        """What is left of `time_limit_ms`, counted from acceptance; None without one."""
        limit_ms = self.admitted.stopping.time_limit_ms
        return self.accepted_at + limit_ms / 1000 - now if limit_ms else None

    @property
    def complete(self) -> common_pb2.FinishReason | None:
        """Why nothing is left to generate, if so."""
        return common_pb2.FINISH_REASON_STOP if self.text.stopped else self.progress.complete

    def avoid(self, address: str) -> None:
        """Makes an executor where an attempt failed the last choice."""
        self.waiting = dataclasses.replace(self.waiting, avoid=self.waiting.avoid | {address})

    def refuse(self, address: str, why: SchedulerError) -> None:
        """Makes an executor that cannot serve it none of its choices."""
        self.waiting = dataclasses.replace(self.waiting, refused=self.waiting.refused | {address})
        self.refusal = why

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs], now: float
    ) -> bool:
        """Passes new tokens on with the text they complete. Whether a stop sequence ended it."""
        self._held_logprobs.extend(logprobs)
        return self._deliver(self.text.push(token_ids), now)

    def flush(self, now: float) -> None:
        """Passes on what was held back, at the end."""
        self._deliver(self.text.finish(), now)

    def _deliver(self, delta: TextDelta | None, now: float) -> bool:
        if delta is None:
            return False
        held = self._held_logprobs
        self.outbox.put(delta, [held.popleft() for _ in delta.token_ids[: len(held)]], now)
        self.completion_tokens += len(delta.token_ids)
        return delta.stopped


def _nothing() -> None:
    """A request whose client reads all the time needs no hanging up."""
