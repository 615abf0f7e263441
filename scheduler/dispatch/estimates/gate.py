"""Who is refused since it would come too late, and what estimates are worth. Pure.

How sure it has to be follows what becomes of those that were let in. While they make their deadlines, only
those are refused of whom nine in ten would miss. In a lasting overload that would be a waste: the queue
grows until those that are let in last miss nearly always, after they have run for most of their time. So
while more than a tenth of them miss, the gate gets stricter, up to letting those in of whom nine in ten make
it (calibration.py).

Those that were accepted before are not asked about, and nobody is refused where too little is known.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.estimates.calibration import SLACK_S, Calibration
from scheduler.dispatch.estimates.estimator import Estimate, Estimator
from scheduler.dispatch.groups import Waiting
from scheduler.errors import DeadlineUnreachable, QueueTooLong

MISSES = 0.1  # Of those that were let in: with more the gate gets stricter, with fewer less strict.
_STEP = 0.1
SHORTEST_S = 0.05  # Of a deadline or limit and an estimate: less is noise.
RETRY_S = (1.0, 60.0)


@dataclass(slots=True)
class Expected:
    """What was expected of a request when it came: seconds from then, before any correction."""

    estimate: Estimate
    came_at: float
    has_deadline: bool
    had_token: bool = False


class Gate:
    def __init__(
        self,
        estimator: Estimator,
        answers: Answers,
        max_queue_s: float = math.inf,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`max_queue_s`: the longest wait of a request without a deadline. `chance`: in [0, 1), spreads when
        those who are refused come again."""
        self.first_token = Calibration()
        self.end = Calibration()
        self.strictness = 0.0  # From 0 to 1.
        self._estimator = estimator
        self._answers = answers
        self._max_queue_s = max_queue_s
        self._chance = chance

    def expect(self, request: Waiting, most: int, deadline_s: float | None, now: float) -> Expected | None:
        """Of a request that comes `now`, may have `most` tokens and is of use for `deadline_s` only. None:
        nothing can be said. Raises DeadlineUnreachable, QueueTooLong."""
        estimate = self._estimator.estimate(request, most, now)
        if estimate is None:
            return None
        if self.first_token.known:
            self._check(estimate, deadline_s)
        return Expected(estimate, now, deadline_s is not None)

    def _check(self, estimate: Estimate, deadline_s: float | None) -> None:
        first, end, strictness = self.first_token, self.end, self.strictness
        if deadline_s is None:
            start = first.typical(estimate.start)
            if start > max(SHORTEST_S, self._max_queue_s):
                raise QueueTooLong(start, self._max_queue_s, self._again_in(start - self._max_queue_s))
            return
        least = first.least(estimate.first_token, strictness)
        if end.known:
            least = max(least, end.least(estimate.end, strictness))
        if least > max(SHORTEST_S, deadline_s):
            expected = max(least, end.typical(estimate.end))
            raise DeadlineUnreachable(expected, deadline_s, self._again_in(expected - deadline_s))

    def _again_in(self, excess_s: float) -> float:
        """When as much of the queue is gone as was too much, at the earliest."""
        least, most = RETRY_S
        return round(min(most, max(least, excess_s)) * (1 + self._chance() / 2), 1)

    # What happened.

    def began(self, expected: Expected, now: float) -> float:
        """Its first token is here. Returns happened / expected, correction included."""
        expected.had_token = True
        estimated, happened = expected.estimate.first_token, now - expected.came_at
        ratio = (happened + SLACK_S) / ((estimated + SLACK_S) * self.first_token.factor)
        self.first_token.learn(estimated, happened, now)
        return ratio

    def ended(self, expected: Expected, now: float, *, late: bool) -> None:
        """It has its last token, or is `late`: its deadline passed before that."""
        happened = now - expected.came_at
        if late and not expected.had_token:
            self.first_token.learn(expected.estimate.first_token, happened, now, at_least=True)
        self.end.learn(expected.estimate.end, happened, now, at_least=late)
        if expected.has_deadline:
            self.strictness = min(1.0, max(0.0, self.strictness + _STEP * (late - MISSES)))

    def left(self, request: Waiting) -> None:
        """It left the queue for the first time, for an executor or for good."""
        self._estimator.left(request)

    def answered(self, request: Waiting, tokens: int, *, stopped: bool) -> None:
        """An answer is whole; `stopped`: it has fewer tokens than it might have."""
        self._answers.ended(request.tenant, request.digest, request.cost, tokens, stopped=stopped)
