"""A clock that jumps from event to event."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Clock:
    """`now` is in seconds. Events of one moment happen in the order in which they were told."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()

    def at(self, when: float, what: Callable[..., None], *args: object) -> None:
        heappush(self._events, (when, next(self._numbers), what, args))

    def run(self, until: float) -> None:
        """Lets everything happen that is due until then."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, args = heappop(events)
            what(*args)
        self.now = max(self.now, until)
