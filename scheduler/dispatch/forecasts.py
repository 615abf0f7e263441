"""What accepted requests are expected to take, held against what they take; refusals and metrics."""

import grpc

from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.estimates.estimator import Estimator
from scheduler.dispatch.estimates.gate import Gate
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.queue import Queue
from scheduler.dispatch.settings import DispatcherSettings
from scheduler.errors import DeadlineUnreachable, QueueTooLong
from scheduler.fleet.index import FleetIndex
from scheduler.metrics import Metrics

OK, LATE = grpc.StatusCode.OK.name, grpc.StatusCode.DEADLINE_EXCEEDED.name


class Forecasts:
    """Asked before a request is queued, and told how it goes. `now` is on the clock of `live.accepted_at`."""

    def __init__(
        self, queue: Queue, index: FleetIndex, settings: DispatcherSettings, metrics: Metrics
    ) -> None:
        answers = Answers()
        estimator = Estimator(queue, index, answers, settings.prompt_token_price)
        self.gate = Gate(estimator, answers, settings.max_queue_s)
        self._metrics = metrics.estimates

    def check(self, live: LiveRequest, deadline_s: float | None) -> None:
        """Of one that has just come. Raises DeadlineUnreachable or QueueTooLong if it would be too late."""
        most = live.admitted.stopping.max_new_tokens - live.completion_tokens
        try:
            now, awake = live.accepted_at, live.served_at
            live.expected = self.gate.expect(live.waiting, most, deadline_s, now, awake)
        except (DeadlineUnreachable, QueueTooLong) as refusal:
            self._metrics.refused(refusal.reason)
            raise

    def left(self, live: LiveRequest) -> None:
        """It was sent to an executor for the first time."""
        self.gate.left(live.waiting)

    def first_token(self, live: LiveRequest, now: float) -> None:
        if live.expected:
            self._metrics.began(self.gate.began(live.expected, now))

    def ended(self, live: LiveRequest, code: str, now: float) -> None:
        """`code` is the name of a gRPC status. Of answers that a time limit may have cut off, nothing is
        learned."""
        if not live.attempts:
            self.gate.left(live.waiting)
        stopping = live.admitted.stopping
        if stopping.time_limit_ms or code not in (OK, LATE):
            return
        if live.expected:
            self.gate.ended(live.expected, now, late=code == LATE)
            for of, learned in (("first_token", self.gate.first_token), ("end", self.gate.end)):
                self._metrics.learned(of, learned.factor, learned.margin(self.gate.strictness))
        if code == OK:
            tokens = live.completion_tokens
            self.gate.answered(live.waiting, tokens, stopped=tokens < stopping.max_new_tokens)
