"""A clock that jumps from event to event, and what is told of requests on it."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class World:
    """The clock, and what is to happen when. `started` and `ended` are by request number."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.asked_at: dict[int, float] = {}
        self.dispatches = 0
        self.refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def clock(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._numbers), what))

    def every(self, period: float, what: Callable[[], None], first: float = 0.0) -> None:
        def again() -> None:
            what()
            self.at(self.now + period, again)

        self.at(first, again)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heappop(self._events)
            what()
        self.now = until

    def waits(self, numbers: list[int]) -> list[float]:
        """Seconds until each one's first token, the longest last; of who has none, until now."""
        return sorted(self.started.get(each, self.now) - self.asked_at[each] for each in numbers)
