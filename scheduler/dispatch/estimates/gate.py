"""Who is refused since it would come too late, and what estimates are worth. Pure.

How sure it has to be follows what becomes of those in doubt: let in now, and refused by the strictest gate.
While they make their deadlines, only those are refused of whom nine in ten would miss. In a lasting overload
that would be a waste: the queue grows until those that are let in last miss nearly always, after they have
run for most of their time. So while more than a tenth of those in doubt miss, the gate gets stricter, up to
letting only those in of whom nine in ten make it (calibration.py).

Those that were accepted before are not asked about, and nobody is refused where too little is known.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.estimates.calibration import Calibration
from scheduler.dispatch.estimates.estimator import Estimate, Estimator
from scheduler.dispatch.groups import Waiting
from scheduler.errors import DeadlineUnreachable, QueueTooLong

MISSES = 0.1  # Of those in doubt that were let in: with more it gets stricter, with fewer less strict.
RAMP_S = 10.0  # It takes so long to get as strict as it can, if all miss: what it does is seen late.
HALF_LIFE_S = 300.0  # Of strictness: when nobody in doubt is let in any more, it is not known what they do.
SHORTEST_S = 0.05  # Of a deadline or limit and an estimate: less is noise.
RETRY_S = (1.0, 60.0)


@dataclass(slots=True)
class Expected:
    """What was expected of a request when it came: seconds from then, before any correction. `in_doubt`: a
    stricter gate would have refused it."""

    estimate: Estimate
    came_at: float
    in_doubt: bool = False
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
        self._adapted_at = self._faded_at = 0.0
        self._estimator = estimator
        self._answers = answers
        self._max_queue_s = max_queue_s
        self._chance = chance

    def expect(
        self,
        request: Waiting,
        most: int,
        deadline_s: float | None,
        now: float,
        awake: float | None = None,
    ) -> Expected | None:
        """Of a request that comes `now`, may have `most` tokens and is of use for `deadline_s` only. None:
        nothing can be said. `awake`: now, on a clock that stands still while this process does, so that what
        did not leave the queue then counts for nothing. Raises DeadlineUnreachable, QueueTooLong."""
        estimate = self._estimator.estimate(request, most, now if awake is None else awake)
        if estimate is None:
            return None
        if not self.first_token.known:
            return Expected(estimate, now)
        if deadline_s is None:
            self._check_wait(estimate)
            return Expected(estimate, now)
        least = self._takes(estimate, self.strictness)
        if least > max(SHORTEST_S, deadline_s):
            expected = max(least, self.end.factor * estimate.end)
            raise DeadlineUnreachable(expected, deadline_s, self._again_in(expected - deadline_s))
        return Expected(estimate, now, in_doubt=self._takes(estimate, 1.0) > deadline_s)

    def _check_wait(self, estimate: Estimate) -> None:
        start = self.first_token.factor * (estimate.start + estimate.slack) - estimate.slack
        if start > max(SHORTEST_S, self._max_queue_s):
            raise QueueTooLong(start, self._max_queue_s, self._again_in(start - self._max_queue_s))

    def _takes(self, estimate: Estimate, strictness: float) -> float:
        """Seconds until its end, or its first token if that is sure to be later."""
        first = self.first_token.margin(strictness) * (estimate.first_token + estimate.slack) - estimate.slack
        return max(first, self.end.margin(strictness) * estimate.end if self.end.known else 0.0)

    def _again_in(self, excess_s: float) -> float:
        """When as much of the queue is gone as was too much, at the earliest."""
        least, most = RETRY_S
        return round(min(most, max(least, excess_s)) * (1 + self._chance() / 2), 1)

    # What happened.

    def began(self, expected: Expected, now: float) -> float:
        """Its first token is here. Returns happened / expected, correction included."""
        expected.had_token = True
        factor = self.first_token.factor
        return self._learn_first(expected, now) / factor

    def ended(self, expected: Expected, now: float, *, late: bool) -> None:
        """It has its last token, or is `late`: its deadline passed before that."""
        if late and not expected.had_token:
            self._learn_first(expected, now, at_least=True)
        self.end.learn(expected.estimate.end, now - expected.came_at, now, at_least=late)
        self._fade(now)
        if expected.in_doubt:
            self._adapt(now, late)

    def _adapt(self, now: float, late: bool) -> None:
        """One that was in doubt has ended."""
        change = min(1.0, max(0.0, now - self._adapted_at) / RAMP_S) * (late - MISSES)
        self.strictness = min(1.0, max(0.0, self.strictness + change))
        self._adapted_at = now

    def _fade(self, now: float) -> None:
        self.strictness *= 0.5 ** (max(0.0, now - self._faded_at) / HALF_LIFE_S)
        self._faded_at = now

    def _learn_first(self, expected: Expected, now: float, *, at_least: bool = False) -> float:
        slack = expected.estimate.slack
        estimated, happened = expected.estimate.first_token + slack, now - expected.came_at + slack
        self.first_token.learn(estimated, happened, now, at_least=at_least)
        return happened / estimated

    def left(self, request: Waiting) -> None:
        """It left the queue for the first time, for an executor or for good."""
        self._estimator.left(request)

    def answered(self, request: Waiting, tokens: int, *, stopped: bool) -> None:
        """An answer is whole; `stopped`: it has fewer tokens than it might have."""
        self._answers.ended(request.tenant, request.digest, request.cost, tokens, stopped=stopped)
