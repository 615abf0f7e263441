"""How long a request that comes now will wait and run. Pure.

It costs the same however many wait and however many executors there are: what the fleet does is summed up a
few times a second, and the queue is asked by tenant (ahead.py).
"""

from dataclasses import dataclass

from scheduler.dispatch.estimates.ahead import Ahead
from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.estimates.drains import Drains
from scheduler.dispatch.estimates.fleet_rates import FleetRates, measure
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.levels import lowest
from scheduler.fleet.residency import BASE, Tier

REFRESH_S = 0.25
PROMISE_S = 0.1  # After so long plans have been made: who waits still does not wait for a seat.


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now: until it leaves the queue, has its first token, and its last one."""

    start: float
    first_token: float
    end: float

    @property
    def slack(self) -> float:
        """What is added to times until the first token before they are compared: waits that are short beside
        the answer are noise."""
        return max(0.01, min(1.0, self.end - self.first_token))


class Estimator:
    def __init__(self, queue: Queue, index: FleetIndex, answers: Answers, prompt_token_price: float) -> None:
        self._queue = queue
        self._index = index
        self._answers = answers
        self._ahead = Ahead(queue, answers, prompt_token_price)
        self._drains = Drains()
        self._promised = 0  # Requests that a seat was free for, and that have not left.
        self._promised_since = -PROMISE_S
        self._rates = FleetRates()
        self._measured_at = -REFRESH_S

    def estimate(self, request: Waiting, most: int, now: float) -> Estimate | None:
        """Of a request that is not in the queue yet and may have `most` tokens. `now` is in seconds of any
        clock.

        None where the queue does not say what it waits for: a seat is free for it, or only a slot is missing,
        or nobody can run it now, or it can run on less than half of the executors, whose line is another one.
        And where not enough is known: an executor that it could run on does not say how fast it is, or no
        answers have ended yet.
        """
        queue, index, digest = self._queue, self._index, request.digest
        queue.follow(index.lengths)
        able = index.holders(queue.needs(request)) & index.open
        if not able or self._has_seat(request, able, now) or not self._answers.known:
            return None
        if digest != BASE and not (index.claims(digest) | index.slotted) & able:
            return None
        rates = self._rates_at(now)
        if rates.unknown & able or not rates.tokens or 2 * able.bit_count() < index.open.bit_count():
            return None
        start = self._start(request, rates, now)
        prompt = request.cost / rates.prompt_tokens if rates.prompt_tokens else 0.0
        begun = start + self._coming(digest, able, rates) + rates.prompt_wait + prompt + rates.token_interval
        answer = self._answers.expected(request.tenant, digest, most)
        return Estimate(start, begun, begun + max(0.0, answer - 1) * rates.token_interval)

    def left(self, request: Waiting) -> None:
        """It is in the queue no more, for the first time."""
        key = (request.tenant, request.digest)
        if any(request.tenant in lane.groups for lane in self._queue.lanes(request.digest)):
            self._drains.left(key)
        else:
            self._drains.emptied(key)
        self._promised = max(0, self._promised - 1)

    def _has_seat(self, request: Waiting, able: int, now: float) -> bool:
        """Whether one is free that nobody has been let in for a moment ago, and not been given yet."""
        free = self._index.seated_for(request.tenant) & able
        if not free:
            return False
        if now - self._promised_since >= PROMISE_S:
            self._promised, self._promised_since = 0, now
        seats = free.bit_count()
        if self._promised >= seats:
            seats = sum(self._index.seats.rooms)
        self._promised += 1
        return self._promised <= seats

    def _start(self, request: Waiting, rates: FleetRates, now: float) -> float:
        """What was seen of those like it, or else what the queue says: all seats are taken, so one more has
        to end than start before it."""
        seen = self._drains.wait((request.tenant, request.digest), self._ahead.of_version(request), now)
        if seen is not None:
            return seen
        seat, _ = self._answers.mean()
        if rates.seat_tokens:
            seat = min(seat, rates.seat_tokens)
        return (self._ahead.tokens(request, now) + seat) / rates.tokens

    def _coming(self, digest: str, able: int, rates: FleetRates) -> float:
        """Seconds until the version is in a slot, when it is on its way at once."""
        if digest == BASE or self._index.claims(digest) & able:
            return 0.0
        closest = self._index.states[lowest(self._index.closest(able, digest))].residency.tier(digest)
        if closest is Tier.SLOT:
            return 0.0
        return rates.page_in + (0.0 if closest is Tier.HOST else rates.load)

    def _rates_at(self, now: float) -> FleetRates:
        if now - self._measured_at >= REFRESH_S:
            self._rates, self._measured_at = measure(self._index), now
        return self._rates
