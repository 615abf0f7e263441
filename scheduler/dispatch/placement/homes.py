"""Which executors a version is at home at: a few, by its traffic. Pure.

The order of the executors comes from names and slots (rendezvous.py), so that all schedulers agree on it, and
a join or a leave moves few versions. How many of them are homes comes from what this scheduler places: a
version that has more than some part of an executor's share of the traffic gets further homes, among which
its requests are spread by seats. A request counts as 1 and fades by the factor e in `heat_s`, so a burst is
heat at once and cools down slowly. An executor that has more than its share already, of traffic by seats or
of versions by slots, is passed over.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.dispatch.placement.rendezvous import Rendezvous
from scheduler.fleet.levels import bits

_MAX_EXPONENT = 100.0  # Heat is kept as of one moment, and grows until that is moved.
_FIRST = 16  # Of an order, which are kept.
_KNOWN = 1.5  # Heat: above that a version has had more than one request lately.
_HALF_RANK = 64  # A version of this rank needs twice the traffic of a tiny one for a second home.


@dataclass(frozen=True, slots=True)
class HomesSettings:
    """Times in seconds.

    `slack` is how much above its share an executor may be home to, as a fraction; half as much again before a
    version that is at home there already has to leave. A version has a home for each `spread` of an
    executor's share of the heat, or for each `least_heat`, however idle the fleet is; by `slack` of that its
    heat has to differ from what its homes are for before their number changes. With a quarter, 200 versions
    by Zipf 1 load 8 executors with 0.85 to 1.15 of their share, for 0.12 page-ins a request; with 1 it is 0.3
    to 1.4, for 0.10 (`scheduler/simulate`). A version with up to `light` of an
    executor's share, or with one request, goes by the order alone: it matters little to the balance, and
    which of many such came first would decide where they are.
    """

    heat_s: float = 20.0
    least_heat: float = 16.0
    spread: float = 0.25
    slack: float = 0.15
    light: float = 0.01
    check_s: float = 1.0  # Between two looks at the homes of a version, unless it gets hotter.
    forget_s: float = 60.0  # Without a request a version takes no room in the balance of its homes.
    max_versions: int = 32768


class Member(NamedTuple):
    """What homes are chosen by of one executor. The weights are above 0."""

    name: str
    seats: int
    slots: int


@dataclass(slots=True, eq=False)
class _Version:
    """`heat`, `share`, `limit` and `due` are in units of the moment that all heat is kept as of."""

    order: list[int] = field(default_factory=list)  # The first ones.
    heat: float = 0.0
    mask: int = 0  # Its homes; 0 until somebody asks.
    share: float = 0.0  # What each of its homes was charged for each of its seats.
    limit: float = 0.0  # With more heat it needs a further home.
    due: float = 0.0  # From this unit on its homes are looked at again.
    serving: int = 0  # The executors that its homes were chosen among.
    used_at: float = 0.0


class Homes:
    """`placed` is told of each request that goes out; `of` says where a version is at home."""

    def __init__(self, settings: HomesSettings | None = None) -> None:
        self._settings = settings or HomesSettings()
        self.members: tuple[Member, ...] = ()  # For reading.
        self._rendezvous = Rendezvous((), ())
        self._versions: OrderedDict[str, _Version] = OrderedDict()  # Those looked at longest ago first.
        self._start = 0.0  # The moment that heat is kept as of.
        self._now = 0.0
        self._unit = 1.0  # A request of now, as of that moment.
        self._total = 0.0  # Heat of all versions.
        self._loads: list[float] = []  # Heat that each executor is home to.
        self._counts: list[int] = []  # Versions that each executor is home to.
        self._num_homes = 0  # The sum of them.
        self._serving = 0  # The next ones are of these executors.
        self._num_serving = self._seats = self._slots = 0

    @property
    def num_versions(self) -> int:
        """Versions that are remembered."""
        return len(self._versions)

    def follow(self, members: Sequence[Member]) -> None:
        """Takes who is there, by position. All homes are chosen anew where that is not what it was."""
        if tuple(members) == self.members:
            return
        self.members = tuple(members)
        self._rendezvous = Rendezvous(
            [member.name for member in members], [float(member.slots) for member in members]
        )
        self._loads = [0.0] * len(members)
        self._counts = [0] * len(members)
        self._num_homes = self._serving = 0
        for version in self._versions.values():
            version.order, version.mask, version.share = [], 0, 0.0

    def placed(self, digest: str, places: int, now: float) -> None:
        """A request of the version goes to one of these executors. Where no home is among them it counts
        twice: its homes cannot take what comes."""
        if now != self._now:
            self._go_to(now)
        version = self._versions.get(digest)
        if version is None:
            version = self._meet(digest)
        heat = self._unit
        if version.mask and not version.mask & places:
            heat += heat
        version.heat += heat
        version.used_at = now
        self._total += heat

    def of(self, digest: str, rank: int, serving: int, now: float) -> int:
        """The homes of a version among the executors that serve, as a mask; 0 only when none does."""
        if now != self._now:
            self._go_to(now)
        version = self._versions.get(digest)
        if version is None:
            version = self._meet(digest)
        has_changed = version.heat > version.limit or self._unit >= version.due
        if has_changed or version.serving != serving or not version.mask:
            self._look_at(digest, version, rank, serving)
        return version.mask

    def _go_to(self, now: float) -> None:
        self._now = now
        exponent = (now - self._start) / self._settings.heat_s
        if exponent > _MAX_EXPONENT:
            self._move_start(now, math.exp(-exponent))
            exponent = 0.0
        self._unit = math.exp(exponent)

    def _move_start(self, now: float, factor: float) -> None:
        self._start = now
        self._total *= factor
        self._loads = [load * factor for load in self._loads]
        for version in self._versions.values():
            version.heat *= factor
            version.share *= factor
            version.limit *= factor
            version.due *= factor

    def _meet(self, digest: str) -> _Version:
        version = self._versions[digest] = _Version(used_at=self._now)
        while len(self._versions) > self._settings.max_versions or self._is_oldest_forgotten():
            _, oldest = self._versions.popitem(last=False)
            self._leave(oldest)
        return version

    def _is_oldest_forgotten(self) -> bool:
        oldest = next(iter(self._versions.values()))
        return self._now - oldest.used_at > self._settings.forget_s

    # Homes.

    def _look_at(self, digest: str, version: _Version, rank: int, serving: int) -> None:
        settings = self._settings
        if serving != self._serving:
            self._count(serving)
        if not serving:
            version.mask = 0
            return
        self._versions.move_to_end(digest)
        before = version.mask
        self._leave(version)
        least = settings.least_heat * (1.0 + rank / _HALF_RANK) * self._unit
        one = max(self._total * settings.spread / self._num_serving, least)
        wanted = self._wanted(version.heat / one, before.bit_count())
        version.limit = (wanted + settings.slack) * one
        version.due = self._unit * math.exp(settings.check_s / settings.heat_s)
        version.serving = serving
        if not version.order:
            version.order = self._rendezvous.order(digest, _FIRST)
        version.mask = self._choose(version, version.order, wanted, before)
        if not version.mask:
            version.mask = self._choose(version, self._rendezvous.order(digest), wanted, before)
        version.share = version.heat / sum(self.members[position].seats for position in bits(version.mask))
        for position in bits(version.mask):
            self._loads[position] += version.share * self.members[position].seats
            self._counts[position] += 1
        self._num_homes += wanted

    def _wanted(self, needed: float, homes: int) -> int:
        """How many homes, for a version with heat for so many that has `homes` now: as many more as it needs
        at once, and one less at a time."""
        slack = self._settings.slack
        homes = min(max(1, homes), self._num_serving)
        if needed > homes + slack:
            return min(math.ceil(needed - slack), self._num_serving)
        return homes - 1 if homes > 1 and needed < homes - 1 - slack else homes

    def _choose(self, version: _Version, order: list[int], wanted: int, before: int) -> int:
        """The first in the version's order that have room for its share; where too few of all have, those
        with least load. 0 where too few of these have, which are not all."""
        mask, full = 0, list[int]()  # Those without room.
        light = max(_KNOWN * self._unit, self._settings.light * self._total / self._num_serving)
        others = (wanted - 1) * self._seats / self._num_serving  # Seats of its other homes, about.
        for position in order:
            bit = 1 << position
            if not bit & version.serving:
                continue
            part = version.heat / (self.members[position].seats + others)
            if version.heat <= light or self._has_room(position, part, bool(before & bit)):
                mask |= bit
                wanted -= 1
                if not wanted:
                    return mask
            else:
                full.append(position)
        if len(order) < len(self.members):
            return 0
        for position in sorted(full, key=self._load)[:wanted]:
            mask |= 1 << position
        return mask

    def _load(self, position: int) -> float:
        """For each seat."""
        return self._loads[position] / self.members[position].seats

    def _has_room(self, position: int, share: float, is_home: bool) -> bool:
        """For a further version and so much heat of it for each seat."""
        settings, member = self._settings, self.members[position]
        above = 1.0 + settings.slack * (1.5 if is_home else 1.0)
        heat = max(self._total, settings.least_heat * self._unit * self._num_serving)
        versions = max(self._num_homes, self._slots)
        return (
            self._load(position) + share <= above * heat / self._seats
            and self._counts[position] + 1 <= above * versions * member.slots / self._slots
        )

    def _leave(self, version: _Version) -> None:
        for position in bits(version.mask):
            self._loads[position] -= version.share * self.members[position].seats
            self._counts[position] -= 1
        self._num_homes -= version.mask.bit_count()
        version.mask, version.share = 0, 0.0

    def _count(self, serving: int) -> None:
        self._serving = serving
        members = [self.members[position] for position in bits(serving)]
        self._num_serving = len(members)
        self._seats = sum(member.seats for member in members)
        self._slots = sum(member.slots for member in members)

    def check(self) -> None:
        """Raises AssertionError when an executor is charged for other versions than it is home to."""
        counts = [0] * len(self.members)
        for version in self._versions.values():
            for position in bits(version.mask):
                counts[position] += 1
        assert counts == self._counts and sum(counts) == self._num_homes
        assert len(self._versions) <= self._settings.max_versions
