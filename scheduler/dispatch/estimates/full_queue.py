"""Who finds the queue of all tenants full, and when they are to come again. Pure.

Who comes when it was told to is let in though the queue is full, which is beyond its bound for moments, and
never beyond twice that.
"""

from lorafleet.doors.places import MOST_OF_ONE, Places
from scheduler.dispatch.queue import Queue

_BEYOND = 2.0


class FullQueue:
    """`now` is in seconds of any clock."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._places = Places(MOST_OF_ONE)

    def check(
        self, tenant: str, key: str, now: float, *, again: bool = False, enters: bool = False
    ) -> float | None:
        """None where there is room for one of the tenant that comes now, else the seconds after which it is
        to come. With `enters` it does come in, and takes the place that is due. `key` is its request's id,
        `again` as in `Queue.add`."""
        times = 2 if again else 1
        held, most = len(self._queue), times * self._queue.max_total
        wait_s = self._places.wait_s(held, most, now, key, tenant, beyond=_BEYOND / times)
        if wait_s is not None:
            self._places.keep(key, now, wait_s, tenant)
        elif enters:
            self._places.taken(key, now, tenant)
        return wait_s

    def left(self, now: float) -> None:
        """One has left the queue, or one that had left it has ended: the next goes on then."""
        self._places.ended(len(self._queue), now)
