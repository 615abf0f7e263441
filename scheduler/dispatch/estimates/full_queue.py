"""Who finds the queue of all tenants full, and when they are to come again. Pure.

Whoever comes for its tenant while one of the tenant's places in line is due takes it, and is let in though
the queue is full. So what was told is kept, and who sends on regardless takes places from its own tenant
alone. Places come due more slowly than requests leave, so the queue is beyond its bound for moments, and
never beyond twice that.
"""

from scheduler.dispatch.estimates.retry_lines import RetryLines
from scheduler.dispatch.queue import Queue


class FullQueue:
    """`now` is in seconds of any clock."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lines = RetryLines()

    def check(self, tenant: str, now: float, *, again: bool = False, enters: bool = False) -> float | None:
        """None where there is room for one of the tenant that comes now, else the seconds after which it is
        to come. With `enters` it does come in, and takes the place that is due. `again` is as in
        `Queue.add`."""
        self._lines.comes(len(self._queue), now)
        if self._queue.full(tenant, again=again) != "total":
            return None
        if self._lines.has_due(tenant, now) and self._queue.full(tenant, again=True) != "total":
            if enters:
                self._lines.take(tenant)
            return None
        return self._lines.refuse(tenant, now)

    def left(self) -> None:
        """One has left the queue, or one that had left it has ended: the next goes on then."""
        self._lines.left()
