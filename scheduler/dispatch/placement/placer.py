"""Which of the executors that could start a request at once gets it. Pure.

Where the version has its closest copy, and of these its homes (homes.py) first; nobody waits for a home while
another executor has room. A home that has to fetch the version draws it when it is less busy than those that
have it: by little where it has an empty slot, by more where another version would lose its own. So what is
cheap goes home soon, and a page-in that wins little is left out. Homes follow how many requests come, not how
long they take: where those that have the version are much busier than others, these get it, home or not. The
next turn of a session goes where its last one was, while that is not much busier: the prefix is there.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.placement.homes import Homes, HomesSettings, Member
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.levels import lowest
from scheduler.fleet.residency import BASE, Tier
from scheduler.fleet.state import ExecutorState


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """How much less busy an executor has to be before a request leaves the one that is nearer, as a fraction
    of seats: `draw` for a home with an empty slot, `move` for a home where a version would be evicted,
    `spread` for one that is no home, `session` for any executor beside the session's last one."""

    draw: float = 1 / 32
    move: float = 1 / 8
    spread: float = 1 / 2
    session: float = 1 / 4
    max_sessions: int = 65536
    homes: HomesSettings = field(default_factory=HomesSettings)


class Placer:
    """The choice among executors with room, of which a set is an int as in FleetIndex."""

    def __init__(self, index: FleetIndex, settings: PlacementSettings | None = None) -> None:
        self._index = index
        self._settings = settings or PlacementSettings()
        self._homes = Homes(self._settings.homes)
        self._sessions: OrderedDict[str, str] = OrderedDict()  # By key: the executor of the last turn.
        self._membership = index.membership
        self.follow()

    def follow(self) -> None:
        """Takes who is there and what each can hold. Who does not say so for now keeps its place."""
        states, self._membership = self._index.states, self._index.membership
        before = {member.name: member for member in self._homes.members}
        members = [_member(state) or before.get(state.name, Member(state.name, 1, 1)) for state in states]
        self._homes.follow(members)

    def choose(self, request: Waiting, fit: int, claimed: int, now: float) -> int:
        """The position that gets a request, or several that are equal, as a mask of some of `fit`. `claimed`
        are those where it needs no further slot."""
        digest, most = request.digest, self._index.seats.most
        if digest != BASE:
            self._homes.placed(digest, fit, now)
        if not fit & fit - 1:
            return fit
        near = fit
        if digest != BASE and fit & ~claimed:  # Where all run it, seats decide.
            near = self.nearest(digest, request.max_rank, fit, claimed, now)
        best = most(near)
        return self._where_last(request, fit, claimed, best) if request.session else best

    def sent(self, session: str, position: int) -> None:
        """A turn of a session goes there."""
        if session:
            self._sessions[session] = self._index.states[position].name
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._settings.max_sessions:
                self._sessions.popitem(last=False)

    def nearest(self, digest: str, rank: int, able: int, claimed: int, now: float) -> int:
        """Of executors that could run a version those that it costs least."""
        index, settings = self._index, self._settings
        if index.membership != self._membership:
            self.follow()
        homes = self._homes.of(digest, rank, index.serving, now) & able
        warm = able & (claimed | index.copies(digest, Tier.SLOT))
        near = warm or index.closest(able, digest)
        best = near & homes or near
        if further := homes & ~near:
            unfilled = further & index.unfilled
            if unfilled and self._is_quieter(unfilled, best, settings.draw):
                return unfilled
            if self._is_quieter(further, best, settings.move):
                return further
        for others in (warm & ~best, able & ~best):
            if others and self._is_quieter(others, best, settings.spread):
                return others
        return best if warm else index.slots.most(best)

    def check(self) -> None:
        """Raises AssertionError when the homes are out of balance or too many sessions are remembered."""
        self._homes.check()
        assert len(self._sessions) <= self._settings.max_sessions

    def _is_quieter(self, there: int, here: int, by: float) -> bool:
        return self._busy(there) + by <= self._busy(here)

    def _busy(self, mask: int) -> float:
        """The fraction of seats in use, of the one with most room."""
        position = lowest(self._index.seats.most(mask))
        return self._index.states[position].busy_seats / self._homes.members[position].seats

    def _where_last(self, request: Waiting, fit: int, claimed: int, best: int) -> int:
        name = self._sessions.get(request.session)
        last = self._index.positions([name]) & fit if name else 0
        if not last or last == best:
            return best
        if request.digest != BASE and not last & (
            claimed | self._index.copies(request.digest, Tier.SLOT, Tier.HOST)
        ):
            return best
        return best if self._is_quieter(best, last, self._settings.session) else last


def _member(state: ExecutorState) -> Member | None:
    limits = state.limits
    return Member(state.name, max(1, limits.max_seats), max(1, limits.max_loras)) if limits else None
