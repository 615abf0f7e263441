"""One accepted request: its place in the queue, its progress, and what its client has yet to read."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence

from lorafleet.v1 import common_pb2
from scheduler.admission.admission import AdmittedRequest
from scheduler.dispatch.estimates.gate import Expected
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.outbox import Outbox
from scheduler.dispatch.progress import Progress
from scheduler.dispatch.reader_line import ReaderLine
from scheduler.errors import SchedulerError
from scheduler.text.text_stream import TextDelta, TextStream
from scheduler.text.tokenizer import Tokenizer


class LiveRequest:
    """Accepted and not ended. The dispatcher alone changes it; its server handler reads `outbox`."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        number: int,
        tokenizer: Tokenizer,
        now: float,
        line: ReaderLine,
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
            masked=bool(admitted.masks),
            session=admitted.session,
            arrived=now,
        )
        self.version = (admitted.adapter, admitted.digest)
        # Who pays for its tokens: tenant, adapter, digest.
        self.account = (admitted.identity.tenant, admitted.adapter, admitted.digest)
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
        self.outbox = Outbox(len(admitted.resumed_token_ids), line)
        self.accepted_at = now
        # When it last ran, or an executor was ready that can run it, busy or not; on the dispatcher's clock
        # for waiting on others.
        self.served_at = now
        self.waits_since = now  # When it was accepted, or an attempt failed that had brought a token.
        self.expected: Expected | None = None  # When it came, if anything could be said.
        self.last_token_at: float | None = None
        self.dispatch_id = ""  # Of the attempt that runs; empty while it waits.
        self.address = ""  # The name of the executor where it runs.
        self.attempts = 0
        self.reserved_tokens = 0  # Of its tenant's output tokens a minute (room.py).
        self.doubtful: frozenset[str] = (
            frozenset()
        )  # Executors that failed it, for a reason of theirs or not.
        self.failures = 0  # Attempts in a row that failed before their first token.
        self.proven = False  # Whether the attempt that runs, or the last one, has had a token.
        self.crashes = 0  # Executors in a row that were lost while it ran there unproven.
        self.refusal: SchedulerError | None = None  # Of the last executor that cannot serve it.
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None  # Of its deadline or time limit.
        self.pause: asyncio.TimerHandle | None = None  # Until it goes back to the queue.
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

    def push(self, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs]) -> bool:
        """Passes new tokens on with the text they complete. Whether a stop sequence ended it."""
        if logprobs:
            self._held_logprobs.extend(logprobs)
        return self._deliver(self.text.push(token_ids))

    def flush(self) -> None:
        """Passes on what was held back, at the end."""
        self._deliver(self.text.finish())

    def _deliver(self, delta: TextDelta | None) -> bool:
        if delta is None:
            return False
        count, held = len(delta.token_ids), self._held_logprobs
        self.outbox.put(delta, [held.popleft() for _ in range(min(count, len(held)))] if held else ())
        self.completion_tokens += count
        return delta.stopped
