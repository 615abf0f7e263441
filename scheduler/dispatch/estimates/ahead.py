"""How much of what waits goes before a request that comes now, in the queue's fair order. Pure."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from scheduler.dispatch.estimates.answers import Answers
from scheduler.dispatch.groups import Tenant, Waiting
from scheduler.dispatch.queue import Queue

REBUILD_S = 0.25  # After so long the curve is drawn anew.
CHANGES = 4  # And after one arrival for so many tenants: so an arrival costs the same, however many wait.
MAX_GROUPS = 32  # Of a tenant, that are looked at; the others are taken to be like them.


@dataclass(frozen=True, slots=True)
class _Share:
    """One tenant's part of the curve: from where to where on the scale of virtual tokens, and the generated
    tokens that it gets for each of them."""

    begin: float
    end: float
    slope: float

    def until(self, virtual: float) -> float:
        return self.slope * (min(max(virtual, self.begin), self.end) - self.begin)


@dataclass(slots=True)
class _Curve:
    """Generated tokens of all tenants until the counters of those that wait are at some virtual tokens."""

    at: float = -REBUILD_S
    shares: dict[str, _Share] = field(default_factory=dict)
    points: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    slopes: list[float] = field(default_factory=list)

    def until(self, virtual: float) -> float:
        place = bisect_right(self.points, virtual) - 1
        if place < 0:
            return 0.0
        return self.sums[place] + self.slopes[place] * (virtual - self.points[place])


class Ahead:
    """Tenants go by turns of virtual tokens, so that of each only counts what it gets until the request's own
    tenant has had what is before the request. What the others have waiting is as of a moment ago."""

    def __init__(self, queue: Queue, answers: Answers, prompt_token_price: float) -> None:
        self._queue = queue
        self._answers = answers
        self._price = prompt_token_price
        self._curve = _Curve()
        self._arrivals = 0  # Since the curve was drawn.

    def of_version(self, request: Waiting) -> int:
        """How many of its tenant and version go before it."""
        groups = [lane.groups.get(request.tenant) for lane in self._queue.lanes(request.digest)]
        return sum(
            len(numbers)
            for group in groups
            if group
            for priority, numbers in group.numbers.items()
            if priority >= request.priority
        )

    def tokens(self, request: Waiting, now: float) -> float:
        """New tokens of those that start before it, about. `now` is in seconds of any clock."""
        tenants = self._queue.tenants
        own = tenants.get(request.tenant)
        if not tenants:
            return 0.0
        answer, prompt = self._mean(request.tenant, own)
        before = self._of_own(own, request) if own else 0.0
        if own and len(tenants) == 1:
            return before * answer
        price = (answer + self._price * prompt) / (own.weight if own else 1.0)
        virtual = self._queue.served(request.tenant) + before * price
        return before * answer + self._of_others(request.tenant, virtual, tenants, now)

    def _mean(self, name: str, waiting: Tenant | None) -> tuple[float, float]:
        """Tokens of an answer and a prompt of the tenant: as those that ended had, but no longer than those
        that wait may be, which others may have sent."""
        answer, prompt = self._answers.mean(name)
        return min(answer, waiting.most / waiting.size) if waiting else answer, prompt

    def _of_own(self, own: Tenant, request: Waiting) -> float:
        """Requests of its tenant: higher priorities, then what other versions get until its own has had its
        turns, and those of its version that came before."""
        priority = request.priority
        higher = sum(count for level, count in own.priorities.items() if level > priority)
        same = [lane.groups.get(own.name) for lane in self._queue.lanes(request.digest)]
        turns = sum(len(group.numbers.get(priority, ())) for group in same if group)
        looked = list(islice(own.groups, MAX_GROUPS))
        met = sum(min(len(group.numbers.get(priority, ())), turns) for group in looked)
        others = met * len(own.groups) / len(looked)
        return higher + max(turns, min(others, own.priorities.get(priority, 0)))

    def _of_others(self, tenant: str, virtual: float, tenants: Mapping[str, Tenant], now: float) -> float:
        self._arrivals += 1
        if now - self._curve.at >= REBUILD_S or self._arrivals * CHANGES > len(tenants):
            self._curve, self._arrivals = self._draw(tenants, now), 0
        of_own = self._curve.shares.get(tenant)
        return self._curve.until(virtual) - (of_own.until(virtual) if of_own else 0.0)

    def _draw(self, tenants: Mapping[str, Tenant], now: float) -> _Curve:
        curve, turns = _Curve(now), list[tuple[float, float]]()
        for name, tenant in tenants.items():
            answer, prompt = self._mean(name, tenant)
            price = (answer + self._price * prompt) / tenant.weight
            begin, slope = tenant.share.tokens, answer / price if price else 0.0
            share = curve.shares[name] = _Share(begin, begin + tenant.size * price, slope)
            turns += [(share.begin, slope), (share.end, -slope)]
        total = slope = last = 0.0
        for virtual, change in sorted(turns):
            total += slope * (virtual - last)
            slope += change
            last = virtual
            curve.points.append(virtual)
            curve.sums.append(total)
            curve.slopes.append(slope)
        return curve
