"""Who was told when to come again, so that a place is kept for it. Pure.

A refused request that comes back after its delay, with the same key, finds what it was told kept for it for a
while (`grace_s`); then it counts no more. Without a key nothing is kept.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

MOST = 4096

T = TypeVar("T")


class Promise(NamedTuple, Generic[T]):
    due: float
    what: T


def grace_s(wait_s: float) -> float:
    """How long after its delay somebody may come: clients add some chance to it, and the way takes time."""
    return 2.0 + wait_s / 4


class Promises(Generic[T]):
    """By key; `lapsed` is told what nobody came for. Not more than `MOST`."""

    def __init__(self, lapsed: Callable[[T], None]) -> None:
        self._lapsed = lapsed
        self._kept: dict[str, Promise[T]] = {}
        self._ends: list[tuple[float, str, float]] = []  # A heap: when it lapses, its key, when it is due.
        self._dues: list[tuple[float, str]] = []  # A heap: the latest first, as -due. Both have left-overs.

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str) -> Promise[T] | None:
        return self._kept.get(key)

    def make(self, key: str, now: float, due: float, what: T) -> bool:
        """Whether it is kept: in place of what the key had before."""
        if not key or len(self._kept) >= MOST:
            return False
        self.end(key)
        self._kept[key] = Promise(due, what)
        heappush(self._ends, (due + grace_s(max(0.0, due - now)), key, due))
        heappush(self._dues, (-due, key))
        return True

    def last_due(self) -> float | None:
        """When the latest is due; None without any."""
        while self._dues:
            later, key = self._dues[0]
            kept = self._kept.get(key)
            if kept is not None and kept.due == -later:
                return kept.due
            heappop(self._dues)
        return None

    def end(self, key: str) -> Promise[T] | None:
        """It is redeemed, or void."""
        return self._kept.pop(key, None)

    def lapse(self, now: float) -> None:
        """Forgets those whose time is over."""
        while self._ends and self._ends[0][0] < now:
            _, key, due = heappop(self._ends)
            kept = self._kept.get(key)
            if kept is not None and kept.due == due:
                del self._kept[key]
                self._lapsed(kept.what)

    def clear(self) -> None:
        self._kept.clear()
        self._ends.clear()
        self._dues.clear()
