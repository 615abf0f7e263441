"""How fast a tenant's requests for a version leave the queue, while some of them wait. Pure.

The queue alone does not say it where a version has many waiting: others that come later, and have had less,
go before them, for as long as they come. What left in the last seconds tells that.
"""

from collections import OrderedDict
from dataclasses import dataclass

WINDOW_S = 10.0  # After so long, what left before counts half, if that is enough to tell.
ENOUGH = 4.0
MAX_KNOWN = 4096

Key = tuple[str, str]
"""Tenant and digest."""


@dataclass(slots=True)
class _Drain:
    since: float  # Some have waited from then on.
    left: float = 0.0

    def elapsed(self, now: float) -> float:
        """Seconds in which so many have left."""
        elapsed = now - self.since
        if elapsed > WINDOW_S and self.left >= 4 * ENOUGH:
            elapsed, self.left = elapsed / 2, self.left / 2
            self.since = now - elapsed
        return elapsed


class Drains:
    """Told of each that comes and of each that leaves. `now` is in seconds of any clock."""

    def __init__(self) -> None:
        self._drains: OrderedDict[Key, _Drain] = OrderedDict()

    def wait(self, key: Key, before: float, now: float) -> float | None:
        """Seconds until so many that wait have left; None when too few have left to say. With nobody before
        it, one that comes now is where a new count begins."""
        drain = self._drains.get(key)
        if not before or drain is None:
            self._drains[key] = _Drain(now)
            self._drains.move_to_end(key)
            if len(self._drains) > MAX_KNOWN:
                self._drains.popitem(last=False)
            return None
        elapsed = drain.elapsed(now)
        return before * elapsed / drain.left if drain.left >= ENOUGH else None

    def left(self, key: Key) -> None:
        """One has left, for an executor or since nobody wants it any more, and others wait."""
        if drain := self._drains.get(key):
            drain.left += 1

    def emptied(self, key: Key) -> None:
        """The last one that waited has left: how fast says nothing of those that come after a while."""
        self._drains.pop(key, None)
