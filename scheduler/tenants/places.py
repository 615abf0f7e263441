"""Places that a tenant holds at once, and the line of those that were told to come again. Pure.

Who is told to come again comes at a distance to the one before it, at which as many places become free as are
asked for: on average, and more where they are few, as one long answer is then all it takes to find none.
"""

import math

from scheduler.tenants.promises import Promises

MOST_KEPT = 4096  # Tenants, before those are forgotten of whom nobody was told to come again.
_REMEMBERED = 256  # Ends by which it is known how long places are held; older ones count half, and so on.
_UNKNOWN_S = 1.0
_LEAST_S = 0.1
_SURE = 3.0  # Of Poisson's: the first end comes within so many times its mean, as 95 times in 100.


class Places:
    """Nobody gets a place that somebody in the line comes back for."""

    def __init__(self) -> None:
        self._promises = Promises[None](lambda _: None)
        self._held_s = 0.0  # Seconds of all places that were held, together.
        self._ends = 0.0
        self._at: float | None = None

    def ended(self, held: int, now: float) -> None:
        """One of `held` places became free."""
        self._pass(held, now)
        self._ends += 1
        if self._ends > _REMEMBERED:
            self._ends, self._held_s = self._ends / 2, self._held_s / 2

    def ask(self, held: int, most: float, now: float, key: str = "") -> float | None:
        """None when there is a place, else the seconds after which there will be one, as 95 times in 100."""
        self._pass(held, now)
        self._promises.lapse(now)
        promise, free = self._promises.get(key), most - held
        if free > len(self._promises) or (promise is not None and now >= promise.due and free > 0):
            return None
        if promise is not None and now < promise.due:
            return promise.due - now
        self._promises.end(key)
        wait_s = self._wait_s(most, now)
        self._promises.make(key, now, now + wait_s, None)
        return wait_s

    def taken(self, key: str) -> None:
        """Whoever was told to come again has its place."""
        self._promises.end(key)

    @property
    def is_idle(self) -> bool:
        return not self._promises

    def _pass(self, held: int, now: float) -> None:
        self._held_s += held * max(0.0, now - (now if self._at is None else self._at))
        self._at = now

    def _wait_s(self, most: float, now: float) -> float:
        """Behind all that were told before."""
        if self._ends:
            sure = 1 + 1.65 / math.sqrt(self._ends)
            gap_s = sure * self._held_s / self._ends / most
        else:
            gap_s = max(_UNKNOWN_S, self._held_s / most)
        behind = (self._promises.last_due() or now) - now + gap_s * (1 + 3 * math.pow(most, -0.75))
        return max(_LEAST_S, gap_s * _SURE, behind)


class Line:
    """The places of all tenants, each with a line of its own."""

    def __init__(self) -> None:
        self._places: dict[str, Places] = {}

    def ask(self, tenant: str, held: int, most: float, now: float, key: str = "") -> float | None:
        """As Places.ask."""
        return self._of(tenant).ask(held, most, now, key)

    def taken(self, tenant: str, key: str) -> None:
        if places := self._places.get(tenant):
            places.taken(key)

    def ended(self, tenant: str, held: int, now: float) -> None:
        if places := self._places.get(tenant):
            places.ended(held, now)

    def _of(self, tenant: str) -> Places:
        places = self._places.get(tenant)
        if places is None:
            if len(self._places) >= MOST_KEPT:
                self._places = {name: kept for name, kept in self._places.items() if not kept.is_idle}
            places = self._places[tenant] = Places()
        return places
