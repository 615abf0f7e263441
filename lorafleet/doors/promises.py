"""Who was told when to come again, so that a place is kept for it. Pure.

A refused request that comes back after its delay, with the same key, finds what it was told kept for it for a
while (`grace_s`); then it counts no more. Without a key it is kept for any that comes of the same caller.
"""

import itertools
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
    """Promises by key; `lapsed` is told what nobody came for. Not more than `most`."""

    def __init__(self, lapsed: Callable[[T], None], most: int = MOST) -> None:
        self._lapsed, self._most = lapsed, most
        self._kept: dict[str, Promise[T]] = {}
        # By caller a heap, none empty: when it is due, and its key, which was made here.
        self._nameless: dict[str, list[tuple[float, str]]] = {}
        self._numbers = itertools.count()
        self._ends: list[tuple[float, str, float]] = []  # A heap: when it lapses, its key, when it is due.
        self._dues: list[tuple[float, str]] = []  # A heap: the latest first, as -due. Both have left-overs.

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str) -> Promise[T] | None:
        return self._kept.get(key)

    def key_of(self, caller: str, key: str, now: float) -> str:
        """The key by which to ask for what was promised to one of the caller, who names it, or cannot ("")
        and gets the first such one that is due; "" where there is none."""
        if key:
            return f"{caller}\0{key}"
        line = self._nameless.get(caller, [])
        while line and line[0][1] not in self._kept:
            heappop(line)
        if not line:
            self._nameless.pop(caller, None)
        return line[0][1] if line and line[0][0] <= now else ""

    def make(self, key: str, now: float, due: float, what: T, caller: str | None = None) -> bool:
        """Whether it is kept: in place of what the key had before; without one for any of the caller."""
        if len(self._kept) >= self._most or (not key and caller is None):
            return False
        if not key and caller is not None:
            key = f"{caller}\0\0{next(self._numbers)}"
            heappush(self._nameless.setdefault(caller, []), (due, key))
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

    def put_back(self, key: str, promise: Promise[T]) -> None:
        """Puts it back as it was before it was ended, at this moment: nobody came for it."""
        self._kept[key] = promise
        latest = (-promise.due, key)
        if not self._dues or latest < self._dues[0]:  # It was dropped meanwhile as a left-over.
            heappush(self._dues, latest)

    def lapse(self, now: float) -> None:
        """Forgets those whose time is over."""
        while self._ends and self._ends[0][0] < now:
            _, key, due = heappop(self._ends)
            kept = self._kept.get(key)
            if kept is not None and kept.due == due:
                del self._kept[key]
                self._lapsed(kept.what)
        self.last_due()  # Drops what is left over of others.
        if not self._kept:
            self._nameless.clear()

    def clear(self) -> None:
        self._kept.clear()
        self._nameless.clear()
        self._ends.clear()
        self._dues.clear()
