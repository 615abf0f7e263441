"""When those who are refused are to come again, where something is full that all tenants share. Pure.

Who is refused gets a place in a line of its tenant's. All lines together move as fast as room becomes free:
so two who are refused at once are not told the same moment, and nobody waits for another tenant's line.
"""

from collections import OrderedDict, deque

from scheduler.dispatch.estimates.drains import Drains

FIRST_GUESS_S = 1.0  # Between two that leave, before enough have left to say.
SURE = 3.0  # Times the mean: within that the next one has left in 19 of 20 cases, when each leaves at random.
PACE = 1.25  # Times the mean, between two places: they come due more slowly than room for them does.
LEAST_S, MOST_S = 0.1, 600.0
KEPT_S = 10.0  # A place that nobody has taken for so long since it was due is gone.
MAX_PLACES = 1024  # Of one tenant. Who finds its line full gets no place, and is told the end of the line.
MAX_TENANTS = 1024
ALL = ("", "")


class RetryLines:
    """`now` is in seconds of any clock."""

    def __init__(self) -> None:
        self._drains = Drains()
        self._lines: OrderedDict[str, deque[float]] = OrderedDict()  # When places are due, in order.

    def comes(self, held: int, now: float) -> None:
        """One comes, and finds so many there."""
        self._drains.wait(ALL, held, now)

    def left(self) -> None:
        """One makes room, and others may still be there."""
        self._drains.left(ALL)

    def has_due(self, tenant: str, now: float) -> bool:
        """Whether one of the tenant was told to come by now."""
        line = self._lines.get(tenant, deque())
        while line and line[0] < now - KEPT_S:
            line.popleft()
        return bool(line) and line[0] <= now

    def take(self, tenant: str) -> None:
        """One of the tenant takes the place that is due."""
        self._lines[tenant].popleft()

    def refuse(self, tenant: str, now: float) -> float:
        """Seconds after which one of the tenant is to come again."""
        line = self._lines.setdefault(tenant, deque())
        self._lines.move_to_end(tenant)
        each_s = (self._drains.pace(ALL, now) or FIRST_GUESS_S) * len(self._lines)
        after_s = SURE * each_s
        if line:
            after_s = max(after_s, line[-1] + PACE * each_s - now)
        after_s = min(max(after_s, LEAST_S), MOST_S)
        if len(line) < MAX_PLACES:
            line.append(now + after_s)
        self._forget(now)
        return after_s

    def _forget(self, now: float) -> None:
        """Lines that nobody has stood in for long, the oldest first."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            if line and line[-1] >= now - KEPT_S and len(self._lines) <= MAX_TENANTS:
                return
            del self._lines[tenant]
