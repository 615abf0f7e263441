"""Lanes in fair order: a heap whose entries are put right when they come up. Pure."""

from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace

from scheduler.dispatch.groups import Lane, Turn
from scheduler.dispatch.queue import Queue


class FairLanes:
    """Some lanes of a queue by their next turns. Lanes where nobody waits any more drop out by themselves.

    Turns only get later by themselves; where one gets earlier, the queue tells (`Queue.fresh`), and the lane
    is to be entered again.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._heap: list[tuple[Turn, int, Lane]] = []
        self._entries: dict[Lane, Turn] = {}  # The entry of each that counts; others are left-overs.

    def enter(self, lane: Lane) -> None:
        """Nothing when it is here already with an earlier turn."""
        turn = self._queue.turn(lane)
        entered = self._entries.get(lane)
        if turn is not None and (entered is None or turn < entered):
            self._entries[lane] = turn
            heappush(self._heap, (turn, lane.serial, lane))

    def add(self, lanes: Iterable[Lane]) -> None:
        """Enters those that are not here, without a look at their turns until they come up."""
        for lane in lanes:
            if lane not in self._entries:
                turn = self._entries[lane] = lane.turns[0]
                heappush(self._heap, (turn, lane.serial, lane))

    def has(self, lane: Lane) -> bool:
        """Whether it is here with a turn that is not too late."""
        return lane in self._entries and not lane.turns[0] < self._entries[lane]

    def top(self) -> tuple[Turn, Lane] | None:
        """Probably the fairest, with a turn that may have got later since."""
        while self._heap:
            entered, _, lane = self._heap[0]
            if self._entries.get(lane) is entered:
                if lane.size:
                    return entered, lane
                del self._entries[lane]
            heappop(self._heap)
        return None

    def bound(self) -> Turn | None:
        """No turn is earlier than this; None when nobody waits here."""
        top = self.top()
        return top[0] if top else None

    def settle(self, entered: Turn, lane: Lane) -> Turn:
        """Takes what `top` said, and returns the same turn where it is right: then this lane is the fairest.
        Else puts turns right until that of the first is, and returns it."""
        while (turn := self._queue.turn(lane)) and turn is not entered:
            self._entries[lane] = turn
            heapreplace(self._heap, (turn, lane.serial, lane))
            entered, lane = self.top() or (turn, lane)
        return entered

    def leave(self, lane: Lane) -> None:
        self._entries.pop(lane, None)
