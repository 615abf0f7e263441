"""Which waiting request goes to which executor next. Pure.

Requests go in the queue's fair order, those that can run before those that cannot: nobody waits behind a
version that has no place. What cannot be placed is not looked at again until something happens that may give
it one: a request arrives in its lane, an executor that it may run on gets room, or its version gets its first
claim. Lanes whose versions run on the same executors are left out together while no seat is free there. So a
plan costs what it places, however much waits or runs.

A version that has no slot is passed over, but not for ever: cold.py says how a slot is freed for it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import NamedTuple, TypeVar

from scheduler.dispatch.cold import ColdLines, ColdNotice
from scheduler.dispatch.groups import Lane, Turn, Waiting
from scheduler.dispatch.lanes import FairLanes, owner
from scheduler.dispatch.placement.placer import PlacementSettings, Placer
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.levels import bits, lowest
from scheduler.fleet.needs import Needs
from scheduler.fleet.residency import BASE, Tier
from scheduler.fleet.state import ExecutorState

MAX_TENANTS_TRIED = 8  # In one lane, where only seats of the reserve are left.
VERSIONS_AN_EXECUTOR = 16  # That run there, about: where more may be concerned, all are looked at.
MIN_KEPT = 64
MAX_LOOKS = 200  # At lanes without a place, in one call: many may have come while nobody had room.


class Placement(NamedTuple):  # One is made for each dispatch: cheaper than a frozen dataclass.
    """Send this request to that executor."""

    number: int
    address: str  # The executor's name.


_Key = TypeVar("_Key")


@dataclass(slots=True, eq=False)
class _Source:
    """Lanes that may have a place, as long as some executors have room."""

    lanes: FairLanes
    serial: int  # Breaks ties apart.
    needs: Needs | None = None  # Of lanes that have to get a slot first; else None.
    claims: int = 0  # Of lanes that have to get a seat at one of these executors, which run their versions.
    turn: Turn | None = None  # Its entry among the sources that counts; None when it is not there.
    tried: dict[Lane, None] = field(default_factory=dict)  # Found no place, until there is other room.


class Policy:
    """Who asks acts on each placement before asking for the next: `Queue.take` and `ExecutorState.sent`."""

    def __init__(
        self,
        queue: Queue,
        index: FleetIndex,
        aging_s: float,
        salt: int = 0,
        placement: PlacementSettings | None = None,
    ) -> None:
        """`salt` is any number, another one for each scheduler: equal executors are not chosen in the same
        order by all."""
        self.cold = ColdLines(queue, index, aging_s)
        queue.is_blocked = self.cold.is_blocked
        self.has_more = False  # The last `next` stopped early: ask again, others may have their turn before.
        self.in_turn = True  # The last placement was the fairest there, and not of one that waited for long.
        self._placer = Placer(index, placement)
        self._queue = queue
        self._index = index
        self._aging_s = aging_s
        self._next = salt  # Where the choice among equals begins, by turns of all positions.
        self._membership = index.membership  # As of the last plan, and its time.
        self._now = 0.0
        self._serials = count()
        self._ready = self._source()
        self._unslotted: dict[Needs, _Source] = {}
        self._sources: list[tuple[Turn, int, _Source]] = []  # A heap by turn; entries are lower bounds.
        self._first: dict[str, None] = {}  # Versions that a free slot belongs to.
        self._crowded: dict[int, _Source] = {}  # By claims: who found no seat where the version runs.
        self._kept = MIN_KEPT  # Of those, the last time that they were looked through.

    def next(self, now: float) -> Placement | None:
        """The next placement; None when nothing that waits can run, or `has_more` is set. `now` is in seconds
        of any clock."""
        self._absorb(now)
        self._now = now
        placement = self._who_has_waited() if self._first else None
        self.in_turn = placement is None
        return placement or self._fairest(now)

    def tend(self, now: float) -> list[ColdNotice]:
        """A few times a second: what executors are to be told about versions that wait for a slot."""
        self._absorb(now)
        return self.cold.tend(now)

    @property
    def num_crowded(self) -> int:
        """Sets of executors that somebody waits for, as far as it is remembered."""
        return len(self._crowded)

    def room_in_s(self, state: ExecutorState) -> float:
        """Until a version that was passed over there gets a slot, about: then one is freed for it."""
        return 0.0 if state.free_slots else self._aging_s

    def likely(self, digest: str) -> ExecutorState | None:
        """Where a version that somebody waits for will probably run once there is room: the target of a
        prefetch hint. None when it is in host memory or a slot already, or nobody takes it."""
        index = self._index
        self._queue.follow(index.lengths)
        able, rank = index.open, 0
        for lane in self._queue.lanes(digest):
            able &= index.holders(lane.needs)
            rank = lane.needs.max_rank
        if digest == BASE or not able:
            return None
        best = self._placer.nearest(digest, rank, able, able & index.claims(digest), self._now)
        state = index.states[lowest(index.seats.most(best))]
        return state if state.residency.tier(digest) < Tier.HOST else None

    # What happened since the last plan.

    def _absorb(self, now: float) -> None:
        queue, index = self._queue, self._index
        queue.follow(index.lengths)
        if index.membership != self._membership:
            self._membership = index.membership
            self.cold.follow()
        if index.changed:
            changed = index.changed & (self.cold.lined | index.told) | index.resized
            if index.resized:
                self._placer.follow()
            index.changed = index.resized = 0
            for position in bits(changed) if changed else ():
                self.cold.refresh(position)
                self._first.update(dict.fromkeys(self.cold.open_to(position)))
        while moved := index.reclaimed or self.cold.moved:
            self._take_up(queue.lanes(moved.popitem()[0]), now)
        if queue.fresh:
            self._take_up(queue.fresh, now)
            queue.fresh.clear()
        if index.grown:
            grown, index.grown = index.grown & index.seated, 0
            self._ready.lanes.add(queue.lanes(BASE))
            self._schedule(self._ready)
            self._wake(self._crowded, self._crowded_at(grown))
            unslotted = [key for key, source in self._unslotted.items() if self._room(source) & grown]
            self._wake(self._unslotted, unslotted)

    def _take_up(self, lanes: Iterable[Lane], now: float) -> None:
        """Something may have given lanes a place. Those for which no seat is free are set aside at once, but
        not those of a tenant with many: together they are one entry among the ready, and elsewhere many."""
        for lane in lanes:
            self.cold.judge(lane, now)
            if not self._may_have_seat(lane) and not owner(lane):
                self._set_aside(lane, self._ready)
                continue
            if crowded := self._crowded.get(self._index.claims(lane.digest)):
                crowded.lanes.leave(lane)
            self._ready.lanes.enter(lane)
        self._schedule(self._ready)

    def _crowded_at(self, grown: int) -> Collection[int]:
        """Keys of sources whose versions may run on one of these executors: all, or by what runs there where
        that is less to look at."""
        index = self._index
        if len(self._crowded) <= grown.bit_count() * VERSIONS_AN_EXECUTOR:
            return [claims for claims in self._crowded if claims & grown]
        running = {digest for position in bits(grown) for digest in index.states[position].digests()}
        return {index.claims(digest) for digest in running} & self._crowded.keys()

    def _wake(self, sources: dict[_Key, _Source], keys: Iterable[_Key]) -> None:
        """Executors have room again: for whom they may have a place."""
        for key in keys:
            source = sources[key]
            for lane in source.tried:
                source.lanes.enter(lane)
            source.tried.clear()
            self._schedule(source)
            if source.turn is None:
                del sources[key]

    # Choices.

    def _who_has_waited(self) -> Placement | None:
        """One request of a version that a free slot belongs to."""
        while self._first:
            digest = next(iter(self._first))
            slots = self.cold.homes(digest) & self._index.slotted
            for lane in self._queue.lanes(digest) if slots else ():
                turn, places = self._queue.turn(lane), slots & self._index.holders(lane.needs)
                if turn and (placement := self._place(lane, turn, places, 0)):
                    return placement
            del self._first[digest]
        return None

    def _fairest(self, now: float) -> Placement | None:
        looks = 0
        self.has_more = False
        while self._sources and self._index.seated:
            if looks == MAX_LOOKS:
                self.has_more = True
                return None
            turn, serial, source = self._sources[0]
            if source.turn is not turn:
                heappop(self._sources)
                continue
            first = source.lanes.first() if self._room(source) else None
            if first is None:
                source.turn = None
                heappop(self._sources)
                continue
            due, lane = first
            if due is not turn:
                source.turn = due
                heapreplace(self._sources, (due, serial, source))
                continue
            claimed, cold = self._places(lane)
            if placement := self._place(lane, turn, claimed | cold, claimed):
                return placement
            looks += 1
            self._set_aside(lane, source)
        return None

    def _may_have_seat(self, lane: Lane) -> bool:
        """False only where no executor with a seat has a claim of the version, or a slot for it."""
        index = self._index
        return lane.digest == BASE or bool((index.claims(lane.digest) | index.slotted) & index.seated)

    def _set_aside(self, lane: Lane, source: _Source) -> None:
        source.lanes.leave(lane)
        if lane.digest == BASE:
            return  # Whoever gets room looks for it.
        claims = self._index.claims(lane.digest)
        if source.claims:
            if source.claims == claims:  # Else it has been among the ready since.
                source.tried[lane] = None
            return
        if source.needs is not None:
            source.tried[lane] = None
            return
        if claims:
            crowded = self._crowded.get(claims)
            if crowded is None:
                crowded = self._crowded[claims] = self._source(claims=claims)
                self._forget_crowded()
            crowded.lanes.enter(lane)
        unslotted = self._unslotted.get(lane.needs)
        if unslotted is None:
            unslotted = self._unslotted[lane.needs] = self._source(lane.needs)
        elif unslotted.lanes.has(lane):
            return
        unslotted.lanes.enter(lane)

    def _places(self, lane: Lane) -> tuple[int, int]:
        """Where it needs no further slot, and where it may take a free one."""
        index = self._index
        holders = index.holders(lane.needs)
        if lane.digest == BASE:
            return holders, 0
        holders &= ~self.cold.closed(lane.digest)
        return holders & index.claims(lane.digest), holders & index.slotted & ~self.cold.held

    def _place(self, lane: Lane, turn: Turn, places: int, claimed: int) -> Placement | None:
        """`turn` is the lane's next."""
        index = self._index
        if not places & index.seated:
            return None
        turns = [turn] if places & index.shared else self._queue.turns(lane, MAX_TENANTS_TRIED)
        for _, _, _, number, tenant in turns:
            if fit := places & index.seated_for(tenant):
                return Placement(number, self._choose(self._queue[number], fit, claimed))
        return None

    def _choose(self, request: Waiting, fit: int, claimed: int) -> str:
        """Not where it failed, then as placement/ has it, then by turns."""
        index = self._index
        if request.avoid:
            fit = fit & ~index.positions(request.avoid) or fit
        fit = self._placer.choose(request, fit, claimed, self._now)
        begin = self._next % len(index.states)
        later = fit >> begin << begin
        position = lowest(later or fit)
        self._next = position + 1
        self._placer.sent(request.session, position)
        return index.states[position].name

    # Sources.

    def _source(self, needs: Needs | None = None, claims: int = 0) -> _Source:
        return _Source(FairLanes(self._queue), next(self._serials), needs, claims)

    def _room(self, source: _Source) -> int:
        """Executors that may have a place for lanes of a source."""
        index = self._index
        if source.claims:
            return source.claims & index.seated
        if source.needs is None:
            return index.seated
        # Seats of the reserve are given to who arrives, or has a claim there: no walk for them.
        return index.holders(source.needs) & index.shared & index.slotted & ~self.cold.held

    def _forget_crowded(self) -> None:
        """Drops sources whose versions run elsewhere by now, when there are twice as many as were kept."""
        if len(self._crowded) <= 2 * self._kept:
            return
        claims = set(map(self._index.claims, self._queue.digests()))
        self._crowded = {key: source for key, source in self._crowded.items() if key in claims}
        self._kept = max(MIN_KEPT, len(self._crowded))

    def _schedule(self, source: _Source) -> None:
        bound = source.lanes.bound()
        if bound and (source.turn is None or bound < source.turn):
            source.turn = bound
            heappush(self._sources, (bound, source.serial, source))

    def check(self) -> None:
        """After `next` said None: raises AssertionError when something that waits could run."""
        self.cold.check()
        self._placer.check()
        for lane in self._queue.all_lanes():
            claimed, cold = self._places(lane)
            assert not (claimed | cold) & self._index.shared, lane
