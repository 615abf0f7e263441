"""Versions that wait for a slot: since when, where they get one, and who makes room. Pure.

A version is cold while somebody waits for it and no executor that could run it has a claim of it that still
takes requests. Cold for `aging_s`, it is overdue: it gets a place in the line of one executor, its home, and
all schedulers are told through that executor. The line is what all of them compute alike: those that wait
there, the longest first, at most half as many as there are slots that nobody pinned. While it is longer than
the free slots, as many versions as it is long are closed there, those that have been in slots for longest:
they get no new requests, so that their slots become free. Free slots belong to the first in the line.

So who is at place k of a line of at most H starts within ceil(k / H) times the longest remaining answer there
plus a load: all H that are closed have ended by then.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from scheduler.dispatch.groups import Lane
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.levels import Levels, lowest
from scheduler.fleet.residency import BASE, Tier
from scheduler.fleet.state import ExecutorState

LEAST_WAIT_S = 0.001  # That can be told: 0 says that the wait is over.
# While a wait lasts it is told again this often; executors forget it when it was not told for three times as
# long. Else all schedulers would keep slots free for one that stands still, and takes none.
REPEAT_S = 1.0
LASTS_S = 3 * REPEAT_S


@dataclass(frozen=True, slots=True)
class ColdNotice:
    """Tell that executor that a version waits for a slot there; `waiting_s` of 0 takes it back."""

    address: str  # The executor's name.
    digest: str
    waiting_s: float


@dataclass(slots=True)
class _Place:
    """Where the version of a lane is in a line."""

    position: int
    state: ExecutorState  # Of its executor, in whose position another may be by now.
    stream: int  # A new stream knows nothing of it.
    since: float
    told_at: float


class ColdLines:
    """`held` are executors whose free slots all belong to those in their lines."""

    def __init__(self, queue: Queue, index: FleetIndex, aging_s: float) -> None:
        self.held = 0
        self.lined = 0  # Executors with a line, or with a place of ours.
        self.moved: dict[
            str, None
        ] = {}  # Versions that were closed or opened somewhere; the policy empties it.
        self._queue = queue
        self._index = index
        self._aging_s = aging_s
        self._young: list[tuple[float, int, Lane]] = []  # A heap by since when; left-overs go in their time.
        self._old: dict[Lane, None] = {}  # Those that are overdue.
        self._places: dict[Lane, _Place] = {}  # For each version one on an executor, for one of its lanes.
        self._own: dict[int, dict[str, float]] = {}  # By executor: since when, of those with a place there.
        self._lines: dict[int, tuple[str, ...]] = {}
        self._told: dict[str, int] = {}  # By version: in whose lines it is.
        self._full = 0
        self._rooms = Levels(len(index.states))  # What is left of lines.
        self._open_to: dict[int, tuple[str, ...]] = {}  # By executor: whom its free slots belong to.
        self._homes: dict[str, int] = {}  # The same by version.
        self._closed_at: dict[int, tuple[str, ...]] = {}
        self._closed: dict[str, int] = {}

    @property
    def num_overdue(self) -> int:
        """Versions with a place in a line."""
        return len({lane.digest for lane in self._places})

    def closed(self, digest: str) -> int:
        """Where the version gets no new requests."""
        return self._closed.get(digest, 0)

    def open_to(self, position: int) -> tuple[str, ...]:
        """The versions that the free slots of an executor belong to."""
        return self._open_to.get(position, ())

    def homes(self, digest: str) -> int:
        """Executors with a free slot that belongs to the version."""
        return self._homes.get(digest, 0)

    def is_blocked(self, lane: Lane) -> bool:
        """Whether a lane waits for more than a seat: for an executor, or a slot there."""
        index, digest = self._index, lane.digest
        able = index.open & index.holders(lane.needs)
        if digest == BASE:
            return not able
        slots = index.claims(digest) & ~self.closed(digest) | index.slotted & ~self.held | self.homes(digest)
        return not able & slots

    def judge(self, lane: Lane, now: float) -> None:
        """Whether a lane is cold, when that may have changed.

        A wait goes on that an attempt which came to nothing has interrupted.
        """
        if lane.digest == BASE or not lane.size:
            return
        began, lane.owed_since = min(now, lane.owed_since), math.inf
        if self._serving(lane):
            lane.cold_since = None
        elif lane.cold_since is None or began < lane.cold_since:
            lane.cold_since = began
            heappush(self._young, (began, lane.serial, lane))

    def _serving(self, lane: Lane) -> int:
        """Executors that take requests of the lane without a further slot."""
        serving = self._index.claims(lane.digest) & self._index.open & self._index.holders(lane.needs)
        return serving & ~self.closed(lane.digest)

    def tend(self, now: float) -> list[ColdNotice]:
        """Takes places back that are not needed any more, repeats the others, and gives new ones to who is
        overdue: tenants in turn, the longest wait of each first."""
        notices = self._tend_places(now)
        for lane, since in self._by_turns(self._overdue(now)):
            if not self._index.open & ~self._full:
                break
            if not self._has_place(lane) and (home := self._home(lane)) is not None:
                notices.append(self._give_place(lane, home, since, now))
        return notices

    def _has_place(self, lane: Lane) -> bool:
        """Its own, or that of another lane of the version which it can use, too."""
        holders = self._index.holders(lane.needs)
        places = [self._places.get(other) for other in self._queue.lanes(lane.digest)]
        return any(holders >> place.position & 1 for place in places if place)

    def _overdue(self, now: float) -> list[tuple[Lane, float]]:
        """The longest wait first."""
        while self._young and now - self._young[0][0] >= self._aging_s:
            self._old[heappop(self._young)[2]] = None
        found = [
            (since, lane.serial, lane)
            for lane in self._old
            if lane.size and (since := lane.cold_since) is not None and now - since >= self._aging_s
        ]
        self._old = {lane: None for _, _, lane in found}
        return [(lane, since) for since, _, lane in sorted(found)]

    def _by_turns(self, overdue: list[tuple[Lane, float]]) -> Iterable[tuple[Lane, float]]:
        by_tenant: dict[str, deque[tuple[Lane, float]]] = {}
        for lane, since in overdue:
            by_tenant.setdefault(next(iter(lane.groups)), deque()).append((lane, since))
        turns = deque(by_tenant.values())
        while turns:
            of_tenant = turns.popleft()
            yield of_tenant.popleft()
            if of_tenant:
                turns.append(of_tenant)

    def _home(self, lane: Lane) -> int | None:
        """Where others wait for the same version, else where the line has most room, near a copy."""
        index = self._index
        # Where it runs it is closed, and gets no slot beside its own: it waits for that to end.
        able = index.holders(lane.needs) & index.open & ~self._full & ~index.claims(lane.digest)
        if not able:
            return None
        told = self._told.get(lane.digest, 0) & able
        best = index.closest(self._rooms.most(told or able), lane.digest)
        return lowest(index.seats.most(best))

    def _give_place(self, lane: Lane, home: int, since: float, now: float) -> ColdNotice:
        state = self._index.states[home]
        self._places[lane] = _Place(home, state, state.streams, since, told_at=now)
        self._own.setdefault(home, {})[lane.digest] = since
        self.refresh(home)
        return _notice(state, lane, since, now)

    def _tend_places(self, now: float) -> list[ColdNotice]:
        """Executors repeat what they were told for a while, also while they take nothing."""
        notices: list[ColdNotice] = []
        for lane, place in list(self._places.items()):
            state = place.state
            knows = state.streams == place.stream
            waits = bool(lane.size) and lane.cold_since == place.since
            if knows and waits and state.takes_requests and _limit(state):
                if now - place.told_at >= REPEAT_S:
                    place.told_at = now
                    notices.append(_notice(state, lane, place.since, now))
                continue
            self._take_place(lane, place)
            if knows and not state.claims(lane.digest):  # Else a dispatch came after, which has told it.
                notices.append(ColdNotice(state.name, lane.digest, 0.0))
        return notices

    def _take_place(self, lane: Lane, place: _Place) -> None:
        del self._places[lane]
        own = self._own[place.position]
        del own[lane.digest]
        if not own:
            del self._own[place.position]
        self.refresh(place.position)

    # Lines.

    def follow(self) -> None:
        """Executors have joined or left: what waited at those that left waits nowhere any more."""
        self._rooms.grow(len(self._index.states))
        for lane, place in list(self._places.items()):
            if self._index.states[place.position] is not place.state:
                self._take_place(lane, place)

    def refresh(self, position: int) -> None:
        """Computes the line of an executor anew, where something changed."""
        state, bit = self._index.states[position], 1 << position
        own = self._own.get(position)
        limit = _limit(state)
        line: tuple[str, ...] = ()
        if (own or state.report.cold) and state.takes_requests:
            line = _line(state, own or {}, limit)
        self._rooms.put(position, limit - len(line))
        self._full = self._full | bit if len(line) == limit else self._full & ~bit
        self.lined = self.lined | bit if line or own else self.lined & ~bit
        if not line and position not in self._lines:
            return
        _swap(self._told, bit, self._lines.pop(position, ()), line)
        if line:
            self._lines[position] = line
        was_held = self.held & bit
        self.held = self.held | bit if line and state.free_slots <= len(line) else self.held & ~bit
        if was_held and not self.held & bit:
            self._index.grown |= bit  # What is left is for everybody.
        open_to = line[: state.free_slots]
        _swap(self._homes, bit, self._open_to.get(position, ()), open_to)
        self._open_to[position] = open_to
        before = self._closed_at.get(position, ())
        self._closed_at[position] = self._victims(state, line, before)
        self.moved.update(_swap(self._closed, bit, before, self._closed_at[position]))

    def _victims(
        self, state: ExecutorState, line: tuple[str, ...], closed: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Those closed already stay so, so that what has drained half is not filled again."""
        if len(line) <= state.free_slots:
            return ()
        loading = sum(state.residency.tier(digest) is not Tier.SLOT for digest in state.claimed())
        oldest = [digest for digest in state.residency.longest_in_slots() if digest not in line]
        wanted = sorted(oldest, key=lambda digest: digest not in closed)  # Stable: the oldest first in each.
        return tuple(wanted[: len(line) + loading])

    def check(self) -> None:
        """Raises AssertionError when lines and places disagree, or a lane is not known as cold."""
        for lane in self._queue.all_lanes():
            assert (lane.cold_since is None) == (lane.digest == BASE or bool(self._serving(lane)))
        assert sorted((at.position, lane.digest, at.since) for lane, at in self._places.items()) == sorted(
            (position, digest, since) for position, own in self._own.items() for digest, since in own.items()
        )
        for position, victims in self._closed_at.items():
            assert all(self.closed(digest) >> position & 1 for digest in victims)
        assert sum(mask.bit_count() for mask in self._closed.values()) == sum(
            len(victims) for victims in self._closed_at.values()
        )
        for position, line in self._lines.items():
            assert len(line) <= _limit(self._index.states[position])


def _notice(state: ExecutorState, lane: Lane, since: float, now: float) -> ColdNotice:
    return ColdNotice(state.name, lane.digest, max(now - since, LEAST_WAIT_S))


def _limit(state: ExecutorState) -> int:
    """Places in the line of an executor: for half of its slots, or one; none where all slots are pinned."""
    slots = state.limits.max_loras - state.residency.num_pinned_in_slots if state.limits else 0
    return max(1, slots // 2) if slots > 0 else 0


def _line(state: ExecutorState, own: dict[str, float], limit: int) -> tuple[str, ...]:
    """What waits there by its own account and by ours, and was not sent by us since."""
    waits = dict(state.report.cold)
    for digest, since in own.items():
        waits[digest] = min(since, waits.get(digest, since))
    ordered = sorted((since, digest) for digest, since in waits.items() if not state.claims(digest))
    return tuple(digest for _, digest in ordered[:limit])


def _swap(masks: dict[str, int], bit: int, before: Iterable[str], after: Iterable[str]) -> dict[str, None]:
    """Moves a bit from the masks of some versions to those of others; those that were changed."""
    changed = dict.fromkeys(sorted(set(before) ^ set(after)))
    for digest in changed:
        masks[digest] = masks.get(digest, 0) ^ bit
        if not masks[digest]:
            del masks[digest]
    return changed
