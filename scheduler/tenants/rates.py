"""The rates of one tenant: token buckets, and the line of those that were told to come again. Pure.

Each of the three rates has a bucket that fills by its rate and holds what comes in `burst_seconds` of it. A
request is let in when every bucket has what it costs. One that costs more than a bucket can hold is let in
when that is full, and the debt is paid before the next. So in any time t no more is let in than

    rate * t + max(burst, the largest single cost)

and, while somebody is told to come again, a second of the rate: who comes a little late, as all do, or not at
all, must not cost the next one its turn because a full bucket took no more meanwhile. So a bucket may hold a
half of that more then, and owe the other half.

Of several schedulers each has a part of the rate, which moves with what all are asked for. So it promises 0.7
of its part only, and whoever comes when nobody who was told needs it gets the rest; and who comes when told
may owe what it costs.

Output tokens are reserved up front, by what the answer may have at most, and what was not used is given back
at its end: so the limit holds whatever runs, an accepted request is never cut for it, and what a refused one
is told does not depend on how long others' answers get.

Who is refused is told when it will be its turn behind all that were told so before, and what it needs then is
kept for it. Nobody is let in who would break such a promise. Where less than half of them come, so much less
is kept: else who never comes again would leave the rate to nobody.
"""

from collections.abc import Iterator
from typing import NamedTuple

from lorafleet.doors.promises import Promise, Promises
from scheduler.tenants.limits import TenantLimits

REASONS = ("REQUEST_RATE", "PROMPT_TOKEN_RATE", "OUTPUT_TOKEN_RATE")
_NEARLY = 1e-6  # Of a token: what floats lose.
_LATE_S = 0.5
_SURE = 0.7  # Of a part of a rate, as far as others' demand moves it within seconds.
_NEWEST = 0.05  # What the last one counts in the part that comes again.
_LATER_S = 1e-3  # Told besides, for what clocks and floats round.


class Costs(NamedTuple):
    requests: float = 1.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0


class Refusal(NamedTuple):
    """`reason` is one of REASONS: the rate that it waits for longest."""

    reason: str
    wait_s: float


class Bucket:
    """Times are in seconds of any one clock. Where that jumps back, no time has passed; where it jumps ahead,
    the bucket is full at most."""

    def __init__(self) -> None:
        self.rate = 0.0  # A second; 0 is no limit.
        self.sure = 0.0  # What can be promised of that.
        self.capacity = 0.0
        self.level = 0.0  # Below 0: a debt.
        self._at: float | None = None

    def adjust(self, now: float, rate: float, capacity: float, spare: float = 0.0, sure: float = 1.0) -> None:
        """Fills it up to now by the rate of before, then takes the new one. A new limit begins full; a
        smaller capacity is one at once. `spare` is what it may hold besides; `sure` the part of the rate
        that it will have later, too."""
        is_new = not self.rate
        self.sure = rate * sure
        self.level += self._filled(now)
        self.rate, self.capacity, self._at = rate, capacity, now
        self.level = capacity if is_new else min(self.level, capacity + spare)

    def is_full(self, now: float) -> bool:
        return self.level + self._filled(now) >= self.capacity

    def needs(self, cost: float) -> float:
        """The level at which so much may be taken."""
        return min(cost, self.capacity)

    def _filled(self, now: float) -> float:
        return self.rate * max(0.0, now - (now if self._at is None else self._at))


class Rates:
    """`share` is what this scheduler may give of the tenant's rates, 1 where it is alone."""

    def __init__(self) -> None:
        self._buckets = (Bucket(), Bucket(), Bucket())
        self._promised = [0.0, 0.0, 0.0]
        self._promises = Promises[Costs](self._lapsed)
        self._returning = 1.0  # The part that comes of those who were told to.
        self._limits: TenantLimits | None = None
        self._is_shared = False

    def check(self, costs: Costs, now: float, key: str = "", guess: Costs | None = None) -> Refusal | None:
        """Whether at least so much is there, without taking it. `guess` is what it will take, for when it is
        told to come again."""
        return self._ask(costs, guess or costs, now, key, take=False)

    def take(self, costs: Costs, now: float, key: str = "") -> Refusal | None:
        """Takes it. A refusal takes nothing."""
        return self._ask(costs, costs, now, key, take=True)

    def charge(self, costs: Costs) -> None:
        """Takes it in any case."""
        for _, bucket, cost in self._limited(costs):
            bucket.level -= cost

    def give_back(self, output_tokens: float) -> None:
        """What was reserved and not used. It goes into a bucket that is adjusted before it is asked."""
        self._buckets[2].level += output_tokens

    def adjust(self, now: float, limits: TenantLimits, share: float = 1.0) -> None:
        """To be called before each question. What was promised by other limits counts no more."""
        self._is_shared = share < 1
        if limits is not self._limits:  # As of all tenants, when the file has changed.
            if limits != self._limits:
                self._promises.clear()
                self._promised = [0.0, 0.0, 0.0]
            self._limits = limits
        rates = (
            limits.requests_per_minute,
            limits.prompt_tokens_per_minute,
            limits.output_tokens_per_minute,
        )
        for bucket, per_minute in zip(self._buckets, rates, strict=True):
            rate = per_minute / 60 * share
            spare = rate * _LATE_S if self._promises else 0.0
            bucket.adjust(now, rate, rate * limits.burst_seconds, spare, _SURE if self._is_shared else 1.0)
        self._promises.lapse(now)
        if not self._promises:
            self._promised = [0.0, 0.0, 0.0]

    def is_idle(self, now: float) -> bool:
        """A new one would be the same."""
        self._promises.lapse(now)
        return not self._promises and all(bucket.is_full(now) for bucket in self._buckets)

    def _ask(self, costs: Costs, guess: Costs, now: float, key: str, *, take: bool) -> Refusal | None:
        promise = self._promises.end(key)
        if promise is not None:
            self._release(promise.what)
        is_due = promise is not None and now >= promise.due
        refusal = self._refusal(costs, now, in_turn=is_due)
        if is_due and (take or refusal):
            self._learn(1.0)
        if refusal is None:
            if take:
                self.charge(costs)
            elif promise is not None:
                self._put_back(key, promise)
            return None
        if promise is not None and not is_due:
            self._put_back(key, promise)
            return Refusal(refusal.reason, promise.due - now)
        later = self._refusal(guess, now, in_turn=False) or refusal
        self._promise(key, now, now + later.wait_s - _LATER_S, guess)
        return later

    def _refusal(self, costs: Costs, now: float, *, in_turn: bool) -> Refusal | None:
        """`in_turn`: what it needs was kept for it. Else it goes now only if it takes nothing that was
        promised, and is behind all others if not."""
        waits = [(0.0, "")]
        for index, bucket, cost in self._limited(costs):
            needs = bucket.needs(cost)
            if in_turn:
                needs -= max(bucket.rate * _LATE_S, needs if self._is_unsure else 0.0)
            elif not self._is_spare(index, bucket, needs, now):
                needs += self._promised[index] * self._kept
            waits.append(((needs - bucket.level) / bucket.sure, REASONS[index]))
        wait_s, reason = max(waits)
        return Refusal(reason, wait_s + _LATER_S) if wait_s > _NEARLY else None

    def _is_spare(self, index: int, bucket: Bucket, needs: float, now: float) -> bool:
        """Nobody who was told to come again needs it: neither the last of them nor the next one."""
        promised = self._promised[index] * self._kept
        if not promised:
            return True
        at_end = bucket.level + bucket.sure * max(0.0, (self._promises.last_due() or now) - now) - promised
        left = promised / len(self._promises)
        if self._is_unsure:
            left = max(left, min(promised, bucket.capacity / 2))
        return at_end >= needs - _NEARLY and bucket.level >= min(needs + left, bucket.capacity)

    def _promise(self, key: str, now: float, due: float, costs: Costs) -> None:
        if self._promises.make(key, now, due, costs):
            self._reserve(costs)

    def _put_back(self, key: str, promise: Promise[Costs]) -> None:
        self._promises.put_back(key, promise)
        self._reserve(promise.what)

    def _reserve(self, costs: Costs) -> None:
        self._promised = [kept + cost for kept, cost in zip(self._promised, costs, strict=True)]

    def _lapsed(self, costs: Costs) -> None:
        self._release(costs)
        self._learn(0.0)

    def _learn(self, came: float) -> None:
        self._returning += _NEWEST * (came - self._returning)

    @property
    def _kept(self) -> float:
        """The part of what was promised that is kept: twice what is likely to be asked for."""
        return min(1.0, 2.0 * self._returning)

    @property
    def _is_unsure(self) -> bool:
        """What somebody was told to come for may not be there then."""
        return self._is_shared or self._kept < 1.0

    def _release(self, costs: Costs) -> None:
        self._promised = [kept - cost for kept, cost in zip(self._promised, costs, strict=True)]

    def _limited(self, costs: Costs) -> Iterator[tuple[int, Bucket, float]]:
        return (
            (index, bucket, cost)
            for index, (bucket, cost) in enumerate(zip(self._buckets, costs, strict=True))
            if bucket.rate
        )
