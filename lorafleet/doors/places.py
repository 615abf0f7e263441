"""Places of which there are so many, and the lines of those that were told to come again. Pure.

Who is told to come again comes at a distance to the one before it, at which as many places become free as are
asked for: on average, and more where they are few, as one long answer is then all it takes to find none. Each
caller has a line of its own, and all lines together move as fast as places become free: so nobody waits for
another caller's line.

No place is left empty for who was told to come, who might not. Who does is let in though all are taken: since
lines move a little more slowly than places become free, there are too many for moments only. It has the key
that it had before; without one, whoever of the caller comes first has the place.
"""

import math
from typing import NamedTuple

from lorafleet.doors.promises import MOST, Promises

MOST_OF_ONE = MOST // 4  # Where callers share the places.
MOST_KEPT = 4096  # Callers, before those are forgotten of whom nobody was told to come again.
_REMEMBERED = 256  # Ends by which it is known how long places are held; older ones count half, and so on.
_UNKNOWN_S = 1.0
LEAST_S = 0.1
BEYOND = 1.5  # Times what there may be, for those that come when they were told to.
_ROUNDED_S = 1e-6


class _Line(NamedTuple):
    size: int
    last: float  # When the last one in it is due.


class Places:
    """`held` places of `most` are taken, everywhere. `now` is in seconds of any clock."""

    def __init__(self, most_of_one: int = MOST) -> None:
        """`most_of_one`: how many of one caller's are told when to come and find it kept, too."""
        self._promises = Promises[str](self._release)
        self._most_of_one = most_of_one
        self._lines = dict[str, _Line]()  # By caller, none empty.
        self._held_s = 0.0  # Seconds of all places that were held, together.
        self._ends = 0.0
        self._ended = 0.0  # Places of those.
        self._at: float | None = None

    def ended(self, held: float, now: float, amount: float = 1.0) -> None:
        """So many of `held` places became free."""
        self._pass(held, now)
        self._ends, self._ended = self._ends + 1, self._ended + amount
        if self._ends > _REMEMBERED:
            self._ends, self._ended, self._held_s = self._ends / 2, self._ended / 2, self._held_s / 2

    def ask(self, held: float, most: float, now: float, key: str = "") -> float | None:
        """None when there is a place, else the seconds after which there will be one, as 95 times in 100,
        which is kept. For places of one caller."""
        wait_s = self.wait_s(held, most, now, key)
        if wait_s is not None:
            self.keep(key, now, wait_s)
        return wait_s

    def wait_s(
        self,
        held: float,
        most: float,
        now: float,
        key: str = "",
        caller: str = "",
        *,
        amount: float = 1.0,
        beyond: float = BEYOND,
    ) -> float | None:
        """Asks, as `ask` does, for so much, of which nothing is kept yet. Who was told to come is let in up
        to `beyond` times `most`, or one more. What needs more than all is let in alone."""
        self._pass(held, now)
        self._promises.lapse(now)
        needs, key = min(amount, most), self._promises.key_of(caller, key, now)
        promise = self._promises.get(key)
        if held + needs <= most or not needs:
            return None
        if promise is not None and now < promise.due:
            return promise.due - now
        if promise is not None and beyond > 1 and held + needs <= max(beyond * most, most + needs):
            return None
        return self._behind(caller, most, needs, now)

    def keep(self, key: str, now: float, wait_s: float, caller: str = "") -> None:
        """Keeps a place for who is told to come after so long."""
        key, due = self._promises.key_of(caller, key, now), now + wait_s
        told = self._promises.get(key)
        if told is not None and told.due >= due - _ROUNDED_S:
            return  # It comes too early, and is told the same.
        self._end(key)
        line = self._lines.get(caller) or _Line(0, due)
        if line.size < self._most(caller) and self._promises.make(key, now, due, caller, caller):
            self._lines[caller] = _Line(line.size + 1, max(due, line.last))

    def taken(self, key: str, now: float, caller: str = "") -> None:
        """Whoever was told to come again has its place."""
        self._end(self._promises.key_of(caller, key, now))

    def is_idle(self, now: float) -> bool:
        """Nobody is to come again any more."""
        self._promises.lapse(now)
        return not self._promises

    def _pass(self, held: float, now: float) -> None:
        self._held_s += held * max(0.0, now - (now if self._at is None else self._at))
        self._at = now

    def _behind(self, caller: str, most: float, amount: float, now: float) -> float:
        """Seconds until so much is free behind all of the caller that were told before. `ends` have to end
        for it, which do so as Poisson says: within the mean and twice its root, as 95 times in 100."""
        if self._ends:
            sure, each = 1 + 1.65 / math.sqrt(self._ends), self._ended / self._ends
            gap_s = sure * self._held_s / self._ends / most
        else:
            gap_s, each = max(_UNKNOWN_S, self._held_s / most), amount
        line = self._lines.get(caller)
        gap_s *= len(self._lines) + (line is None)
        ends = max(1.0, amount / each)
        spread = 1 + 3 * math.pow(max(1.0, most / each), -0.75)
        behind = (line.last - now if line else 0.0) + gap_s * ends * spread
        return max(LEAST_S, gap_s * (ends + 2 * math.sqrt(ends)), behind)

    def _most(self, caller: str) -> int:
        """The most of its promises: what can be kept in all lasts for those who have none yet, too."""
        others = len(self._lines) - (caller in self._lines)
        return min(self._most_of_one, MOST // (others + 2)) if others else self._most_of_one

    def _end(self, key: str) -> None:
        if promise := self._promises.end(key):
            self._release(promise.what)

    def _release(self, caller: str) -> None:
        line = self._lines.pop(caller)
        if line.size > 1:
            self._lines[caller] = line._replace(size=line.size - 1)


class Line:
    """The places of all tenants, each with a line of its own."""

    def __init__(self) -> None:
        self._places: dict[str, Places] = {}

    def of(self, tenant: str, now: float) -> Places:
        places = self._places.get(tenant)
        if places is None:
            if len(self._places) >= MOST_KEPT:
                self._places = {name: kept for name, kept in self._places.items() if not kept.is_idle(now)}
            places = self._places[tenant] = Places()
        return places

    def ended(self, tenant: str, held: float, now: float, amount: float = 1.0) -> None:
        """The same as Places.ended, of a tenant that was asked for."""
        if places := self._places.get(tenant):
            places.ended(held, now, amount)

    def taken(self, tenant: str, key: str, now: float) -> None:
        """The same as Places.taken."""
        if places := self._places.get(tenant):
            places.taken(key, now)
