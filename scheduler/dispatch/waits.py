"""How long the longest waits last, and what those who wait are missing."""

from collections.abc import Mapping
from itertools import islice

from scheduler.dispatch.queue import Queue
from scheduler.dispatch.reaper import Reaper

MAX_LANES = 2048  # That are looked at in one go.


class Waits:
    """Looks at lanes, not at requests; beyond `MAX_LANES` of them, at some."""

    def __init__(self, queue: Queue, reaper: Reaper) -> None:
        self._queue = queue
        self._reaper = reaper

    def longest(self, now: float) -> Mapping[str, float]:
        """Seconds by what is missing: a slot of the version, a seat, or an executor that is ready."""
        found = {"slot": 0.0, "seat": 0.0, "executor": 0.0}
        for lane in islice(self._queue.all_lanes(), MAX_LANES):
            unserved, cold = self._reaper.unserved_since(lane.needs), lane.cold_since
            reason = "executor" if unserved is not None else "slot" if cold is not None else "seat"
            found[reason] = max(found[reason], now - self._queue.oldest(lane))
        return found
