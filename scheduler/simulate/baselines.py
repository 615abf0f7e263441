"""Policies to compare the scheduler's own with: they know seats, and neither slots nor copies.

Each takes requests in the order in which they were accepted. What they send to an executor without a free
slot waits there.
"""

from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush

from scheduler.dispatch.cold import ColdNotice
from scheduler.dispatch.groups import Lane
from scheduler.dispatch.policy import Placement, Policy
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.levels import lowest
from scheduler.fleet.residency import BASE
from scheduler.fleet.state import ExecutorState

BOUND = 1.25  # Of the mean of what runs on an executor.


class FirstCome(Policy):
    """The oldest request goes to the executor with the most free seats."""

    def __init__(self, queue: Queue, index: FleetIndex, aging_s: float, salt: int = 0) -> None:
        super().__init__(queue, index, aging_s, salt)
        self.in_turn = True
        self._lanes: list[tuple[int, int, Lane]] = []  # A heap by the oldest request; left-overs go in time.
        self._stuck: dict[Lane, None] = {}  # Whose executor has no seat.
        self._served: Lane | None = None  # Where the last one was taken from.

    def next(self, now: float) -> Placement | None:
        queue, index = self._queue, self._index
        queue.follow(index.lengths)
        if self._served:
            self._enter(self._served)
            self._served = None
        for lane in queue.fresh:
            self._stuck.pop(lane, None)
            self._enter(lane)
        queue.fresh.clear()
        if index.grown:
            index.grown = 0
            for lane in self._stuck:
                self._enter(lane)
            self._stuck.clear()
        while self._lanes and index.seated:
            number, _, lane = heappop(self._lanes)
            if not lane.size or _oldest(lane) != number:
                continue
            seated = index.seated & index.holders(lane.needs)
            if place := self._choose_place(lane.digest, seated):
                self._served = lane
                return Placement(number, index.states[lowest(place)].address)
            self._stuck[lane] = None
        return None

    def _enter(self, lane: Lane) -> None:
        if lane.size:
            heappush(self._lanes, (_oldest(lane), lane.serial, lane))

    def _choose_place(self, digest: str, seated: int) -> int:
        """One of those with a seat, as a mask; 0 when it has to wait."""
        return seated and self._index.seats.most(seated)

    def tend(self, now: float) -> list[ColdNotice]:
        return []

    def likely(self, digest: str) -> ExecutorState | None:
        return None


class RoundRobin(FirstCome):
    """Executors in turn, those without a seat left out."""

    _at = 0

    def _choose_place(self, digest: str, seated: int) -> int:
        place = (seated >> self._at << self._at) or seated
        place &= -place
        if place:
            self._at = lowest(place) + 1
        return place


class Hash(FirstCome):
    """An adapter has one executor, by rendezvous hashing, and waits for a seat there."""

    def __init__(self, queue: Queue, index: FleetIndex, aging_s: float, salt: int = 0) -> None:
        super().__init__(queue, index, aging_s, salt)
        self._ranked: dict[tuple[str, int], list[int]] = {}  # Of an adapter, for those that are open.

    def _choose_place(self, digest: str, seated: int) -> int:
        if digest == BASE:
            return super()._choose_place(digest, seated)
        return 1 << self._rank(digest)[0] & seated

    def _rank(self, digest: str) -> list[int]:
        """Positions of open executors, the first choice first."""
        index = self._index
        key = digest, index.open
        if key not in self._ranked:
            names = [(at, state.address) for at, state in enumerate(index.states) if index.open >> at & 1]
            self._ranked[key] = [at for at, _ in sorted(names, key=lambda each: -weight(digest, each[1]))]
        return self._ranked[key]


class BoundedHash(Hash):
    """The same, but the next one in its order while one has more than its share of what runs."""

    def _choose_place(self, digest: str, seated: int) -> int:
        if digest == BASE or not self._index.open:
            return super()._choose_place(digest, seated)
        states = self._index.states
        ranked = self._rank(digest)
        bound = BOUND * (1 + sum(states[at].num_running for at in ranked)) / len(ranked)
        for at in ranked:
            if seated >> at & 1 and states[at].num_running < bound:
                return 1 << at
        return 0


def weight(digest: str, name: str) -> int:
    """The weight of an executor for an adapter, the same in all processes."""
    return int.from_bytes(blake2b(f"{digest} {name}".encode(), digest_size=8).digest())


def _oldest(lane: Lane) -> int:
    return min(numbers[0] for group in lane.groups.values() for numbers in group.numbers.values())


def production(queue: Queue, index: FleetIndex, aging_s: float, salt: int) -> Policy:
    """What schedulers run."""
    return Policy(queue, index, aging_s, salt)


POLICIES: dict[str, Callable[[Queue, FleetIndex, float, int], Policy]] = {
    "production": production,
    "fcfs": FirstCome,
    "round-robin": RoundRobin,
    "hash": Hash,
    "bounded-hash": BoundedHash,
}
