"""An answer in the making: it folds the chunks of a stream, and of those that resume it after a break.

Pure: it is told the time and what arrived, and says what to send next. Both clients drive it with one loop:

    while not answer.done:
        send answer.next_request(), with answer.time_left(now) as its deadline
        for each message: hand out answer.accept(message)
        when the stream broke or ended: wait for answer.after_break(error, now) seconds
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from lorafleet import wire
from lorafleet.errors import DeadlineExceeded, InternalError, LoraFleetError, QueueFull, Unavailable
from lorafleet.requests import asks_for_masks
from lorafleet.results import Chunk, FinishReason, Generation, PositionLogprobs, Usage
from lorafleet.v1 import inference_pb2

# Reasons with which an accepted request ends that is owed its answer still: a lost connection has none, and
# a server that ends had no time for it. Any other is a server's answer.
_LEFT_UNANSWERED = ("", "DRAINING")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to go on after a break: times in seconds.

    A break is an UNAVAILABLE, or an end without a server's word (LoraFleetError.is_lost_connection).
    A request that no server has accepted yet is tried `start_attempts` times. One that was accepted, and lost
    with its server, is asked for, or taken up, again until `resume_timeout` has passed without a new token;
    then its error is raised. Neither is tried again before its first chunk once a server has waited for an
    executor in vain.
    A full queue or quota (RESOURCE_EXHAUSTED) ends a request that was not accepted, unless `refused_attempts`
    says how often it may be tried, each time after the server's own delay: its place is kept for it. One that
    was accepted waits for its place.
    But gRPC says RESOURCE_EXHAUSTED, too, without a reason, of a message that is too large for one side,
    which no wait makes smaller, and of what passes, as a lack of memory. That is tried `start_attempts` times
    in a row.
    The n-th wait is first_delay * 2^n, at most max_delay, shortened by up to half at random so that the
    clients of a restarted server do not come all at once. A server's own retry delay is never undercut: up to
    first_delay comes on top of it.
    """

    resume_timeout: float = 60.0
    start_attempts: int = 4
    refused_attempts: int = 1
    first_delay: float = 0.1
    max_delay: float = 5.0

    def delay(self, attempt: int, chance: float) -> float:
        """The wait before attempt 1, 2, ...; chance: in [0, 1)."""
        return min(self.max_delay, self.first_delay * 2.0 ** min(attempt - 1, 32)) * (1 - chance / 2)


class Answer:
    """One request's answer so far. Not thread-safe: one loop drives it."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        policy: RetryPolicy,
        deadline: float | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """deadline: on the clock of the `now` that the methods are told; None is no limit."""
        self._request = request
        self._policy = policy
        self._deadline = deadline
        self._chance = chance
        self._first: inference_pb2.GenerateChunk | None = None  # tells version and seed
        self._accepted = False
        self._answer_id = ""
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self._end: tuple[FinishReason, Usage] | None = None
        self._new_stream = True
        self._failures = 0  # in a row, without a new token between them
        self._exhausted = 0  # of those, how often gRPC itself said RESOURCE_EXHAUSTED
        self._broken_since: float | None = None
        self._refused = 0  # times, before a server accepted it

    @property
    def done(self) -> bool:
        """The last chunk is here."""
        return self._end is not None

    @property
    def accepted(self) -> bool:
        """A server has accepted the request, whether it could begin to answer or not."""
        return self._accepted or self._first is not None

    @property
    def answer_id(self) -> str:
        """The name that the last server that named it gave it; "" before that."""
        return self._answer_id

    def next_request(self) -> inference_pb2.GenerateRequest:
        """What to send now: the request itself, or, once the first chunk is here, how to go on with it."""
        self._new_stream = True
        if self._first is None:
            return self._request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.adapter_digest = self._first.adapter_digest
        request.resume.seed = self._first.seed
        request.resume.output_token_ids.extend(self._token_ids)
        request.resume.answer_id = self._answer_id
        if request.response.echo and any(self._text):
            request.response.echo = False  # the prompt's text is here already
        if self._prompt_logprobs:
            request.response.ClearField("prompt_logprobs")
        return request

    def time_left(self, now: float) -> float | None:
        """Seconds until the deadline, None without one; raises DeadlineExceeded when it has passed."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        return self._deadline - now

    def accept(self, message: inference_pb2.GenerateChunk) -> Chunk:
        """Fold a message in. Raises InternalError when it does not continue this answer, and LoraFleetError
        when the server is older than what the request asks."""
        if self._new_stream:
            self._check_first(message)
        if self._first is None:
            self._first = message
        if message.token_ids and message.output_index != len(self._token_ids):
            raise _wrong_stream(f"token {message.output_index} came after {len(self._token_ids)} tokens")
        self._new_stream = False
        self._answer_id = message.answer_id or self._answer_id
        chunk = _chunk(self._first, message, self._answer_id)
        self._token_ids += chunk.token_ids
        self._text.append(chunk.text)
        self._logprobs += chunk.logprobs
        self._prompt_logprobs = self._prompt_logprobs or chunk.prompt_logprobs
        if chunk.token_ids:
            self._failures, self._exhausted, self._broken_since = 0, 0, None
        if chunk.finish_reason and chunk.usage:
            self._end = chunk.finish_reason, chunk.usage
        return chunk

    def after_break(self, error: LoraFleetError | None, now: float) -> float:
        """The stream has ended, `error` tells how. Returns the seconds to wait; raises to give up.

        An answer that is whole stays so, whatever became of its connection.
        """
        if self.done:
            return 0.0
        if error is None:
            error = Unavailable(grpc.StatusCode.UNAVAILABLE, "the stream ended before the answer did")
        self._accepted = self._accepted or (error.accepted and error.reason in _LEFT_UNANSWERED)
        self._answer_id = error.answer_id or self._answer_id
        if not self._may_go_on(error):
            raise error
        if self._broken_since is None:
            self._broken_since = now
        self._failures += 1
        chance = self._chance()
        delay = self._policy.delay(self._failures, chance)
        if error.retry_after is not None:
            delay = max(delay, error.retry_after + chance * self._policy.first_delay)
        limit = self._broken_since + self._policy.resume_timeout
        if now + delay >= (limit if self._deadline is None else min(limit, self._deadline)):
            raise error
        return delay

    def generation(self) -> Generation:
        """The whole answer; to be asked when `done`."""
        if self._first is None or self._end is None:
            raise ValueError("the answer is not whole yet")
        finish_reason, usage = self._end
        return Generation(
            request_id=self._first.request_id,
            adapter_digest=self._first.adapter_digest,
            seed=self._first.seed,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=finish_reason,
            usage=usage,
            answer_id=self._answer_id,
        )

    def _may_go_on(self, error: LoraFleetError) -> bool:
        if self._first is None and error.reason == "NO_EXECUTOR":
            return False
        is_away = isinstance(error, Unavailable) or error.is_lost_connection
        if not self.accepted and isinstance(error, QueueFull) and error.retry_after is not None:
            self._refused += 1
            return self._refused < self._policy.refused_attempts
        if not self.accepted:
            return is_away and self._failures + 1 < self._policy.start_attempts
        if isinstance(error, QueueFull) and not error.reason:
            self._exhausted += 1
            return self._exhausted < self._policy.start_attempts
        return is_away or isinstance(error, QueueFull)

    def _check_first(self, message: inference_pb2.GenerateChunk) -> None:
        """A stream that goes on must go on with the same version and seed: never with another's answer.
        And no server may pass over what the answer is to be held to."""
        if asks_for_masks(self._request) and not message.masked:
            raise LoraFleetError(
                grpc.StatusCode.UNIMPLEMENTED,
                "the server is too old for constraints, allowed_token_ids and bad_words",
                reason="CONSTRAINTS_UNSUPPORTED",
            )
        if self._first is None:
            return
        if (message.adapter_digest, message.seed) != (self._first.adapter_digest, self._first.seed):
            raise _wrong_stream(f"it went on with {message.adapter_digest or 'the base model'}")


def _wrong_stream(detail: str) -> InternalError:
    message = f"the server broke the stream's contract: {detail}"
    return InternalError(grpc.StatusCode.INTERNAL, message, reason="WRONG_STREAM")


def _chunk(first: inference_pb2.GenerateChunk, message: inference_pb2.GenerateChunk, answer_id: str) -> Chunk:
    finished = wire.finish_reason(message.finish_reason)
    return Chunk(
        request_id=first.request_id,
        adapter_digest=first.adapter_digest,
        seed=first.seed,
        output_index=message.output_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=wire.logprobs(message.logprobs),
        prompt_logprobs=wire.logprobs(message.prompt_logprobs),
        finish_reason=finished,
        usage=wire.usage(message.usage) if finished else None,
        answer_id=answer_id,
    )
