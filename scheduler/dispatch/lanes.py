"""Lanes in fair order: a heap whose entries are put right when they come up. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import TypeAlias

from scheduler.dispatch.groups import Lane, Tenant, Turn
from scheduler.dispatch.queue import Queue

MANY_LANES = 4  # Of a tenant: from so many on they have an order of their own.

Rank: TypeAlias = tuple[int, float, int]
"""What follows the tenant's virtual tokens in a turn."""


@dataclass(slots=True, eq=False)
class _OwnLanes:
    """Lanes in which one tenant waits alone: their order stays, whatever it is charged for one of them."""

    tenant: str
    serial: int  # Breaks ties apart.
    turn: Turn | None = None  # Its entry among the others that counts: no turn of its lanes is earlier.
    heap: list[tuple[Rank, int, Lane]] = field(default_factory=list)
    ranks: dict[Lane, Rank] = field(default_factory=dict)  # The entry of each that counts.

    def enter(self, lane: Lane, rank: Rank) -> None:
        """Nothing when it is here already with an earlier one."""
        entered = self.ranks.get(lane)
        if entered is None or rank < entered:
            self.ranks[lane] = rank
            heappush(self.heap, (rank, lane.serial, lane))

    def top(self, owners: dict[Lane, "_OwnLanes"]) -> Lane | None:
        """Probably the fairest. Lanes where nobody waits any more leave `owners`, too."""
        while self.heap:
            rank, _, lane = self.heap[0]
            if self.ranks.get(lane) is rank:
                if lane.size:
                    return lane
                del self.ranks[lane], owners[lane]
            heappop(self.heap)
        return None

    def settle(self, lane: Lane, rank: Rank) -> bool:
        """Puts the entry of the first one right. Whether it was."""
        if self.ranks[lane] == rank:
            return True
        self.ranks[lane] = rank
        heapreplace(self.heap, (rank, lane.serial, lane))
        return False


class FairLanes:
    """Some lanes of a queue by their next turns. Lanes where nobody waits any more drop out by themselves.

    Turns only get later by themselves; where one gets earlier, the queue tells (`Queue.fresh`), and the lane
    is to be entered again. A tenant that is charged makes the turns of all its lanes later at once: where it
    has many, those that are its alone are one entry here, so that not each of them has to be put right.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._heap: list[tuple[Turn, int, Lane | _OwnLanes]] = []
        self._entries: dict[Lane, Turn] = {}  # The entry of each that counts; others are left-overs.
        self._own: dict[str, _OwnLanes] = {}  # By tenant.
        self._owners: dict[Lane, _OwnLanes] = {}
        self._serials = count(-1, -1)  # None is a lane's.

    def enter(self, lane: Lane) -> None:
        """Nothing when it is here already with an earlier turn."""
        turn = self._queue.turn(lane)
        if turn is None:
            return
        tenant, owner = _whose(lane, turn), self._owners.get(lane)
        if owner and owner.tenant != tenant:
            self._disown(lane)
        if tenant and lane not in self._entries:
            self._enter_own(tenant, lane, turn)
            return
        entered = self._entries.get(lane)
        if entered is None or turn < entered:
            self._entries[lane] = turn
            heappush(self._heap, (turn, lane.serial, lane))

    def add(self, lanes: Iterable[Lane]) -> None:
        """Enters those that are not here, without a look at their turns until they come up."""
        for lane in lanes:
            if lane not in self._entries and lane not in self._owners:
                turn = self._entries[lane] = lane.turns[0]
                heappush(self._heap, (turn, lane.serial, lane))

    def has(self, lane: Lane) -> bool:
        """Whether it is here with a turn that is not too late."""
        if owner := self._owners.get(lane):
            turn = lane.turns[0]  # Where it is right by now: else the lane is entered once more, and in vain.
            return _whose(lane, turn) == owner.tenant and not turn[1:4] < owner.ranks[lane]
        return lane in self._entries and not lane.turns[0] < self._entries[lane]

    def first(self) -> tuple[Turn, Lane] | None:
        """The fairest and its turn, when entries that come up were put right; None when nobody waits here."""
        while top := self._top():
            entered, lane = top
            turn = self._queue.turn(lane)
            if turn is None or turn is entered:
                return top
            self._put_right(lane, turn)
        return None

    def bound(self) -> Turn | None:
        """No turn is earlier than this; None when nobody waits here."""
        top = self._top()
        return top[0] if top else None

    def leave(self, lane: Lane) -> None:
        self._entries.pop(lane, None)
        self._disown(lane)

    def _top(self) -> tuple[Turn, Lane] | None:
        """Probably the fairest, with a turn that may have got later since."""
        while self._heap:
            entered, _, first = self._heap[0]
            if isinstance(first, Lane):
                if self._entries.get(first) is entered:
                    if first.size:
                        return entered, first
                    del self._entries[first]
            elif first.turn is entered:
                if lane := first.top(self._owners):
                    return entered, lane
                first.turn = None
                del self._own[first.tenant]
            heappop(self._heap)
        return None

    def _put_right(self, lane: Lane, turn: Turn) -> None:
        """The first entry: that of the lane, or of its owner with this lane as its first."""
        tenant, owner = _whose(lane, turn), self._owners.get(lane)
        if owner is None and tenant is None:
            self._entries[lane] = turn
            heapreplace(self._heap, (turn, lane.serial, lane))
        elif owner is None or owner.tenant != tenant:
            self.leave(lane)
            self.enter(lane)
        elif owner.settle(lane, turn[1:4]):
            owner.turn = turn
            heapreplace(self._heap, (turn, owner.serial, owner))

    def _enter_own(self, tenant: str, lane: Lane, turn: Turn) -> None:
        owner = self._own.get(tenant)
        if owner is None:
            owner = self._own[tenant] = _OwnLanes(tenant, next(self._serials))
        self._owners[lane] = owner
        owner.enter(lane, turn[1:4])
        if owner.turn is None or turn < owner.turn:
            owner.turn = turn
            heappush(self._heap, (turn, owner.serial, owner))

    def _disown(self, lane: Lane) -> None:
        if owner := self._owners.pop(lane, None):
            owner.ranks.pop(lane, None)


def owner(lane: Lane) -> Tenant | None:
    """The tenant that waits in many lanes, and in this one alone."""
    if len(lane.groups) != 1:
        return None
    [group] = lane.groups.values()
    return group.tenant if len(group.tenant.groups) >= MANY_LANES else None


def _whose(lane: Lane, turn: Turn) -> str | None:
    """The owner's name, while nothing is next in the lane that it has paid for."""
    tenant = owner(lane)
    return tenant.name if tenant and turn[0] == tenant.at else None
