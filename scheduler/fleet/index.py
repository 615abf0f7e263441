"""The executors by what plans ask for: room, claims, copies, tenants. Never walked. Pure.

A set of executors is an int: bit i is the executor at position i, so "takes requests, has a seat and a copy"
is two ANDs however many executors there are. Executors come and go: who joins takes the lowest position that
is vacant, so masks stay as short as the fleet was large.
"""

from collections.abc import Iterable, Sequence

from scheduler.fleet.levels import Levels, lowest
from scheduler.fleet.needs import Needs
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import ExecutorState, Limits

SEATS_A_RESERVED = 8
MAX_CACHED_NEEDS = 4096
MAX_FORMER = 64


class FleetIndex:
    """Watches the states of its members. The masks are for reading, and have members only.

    `states` has a state for each position; at a vacant one it is nobody's, and in no mask. `reserve_seats` of
    an executor, an eighth of them at most, are only for tenants that have fewer than so many running there.
    """

    def __init__(self, states: Sequence[ExecutorState], reserve_seats: int = 0) -> None:
        self.states: list[ExecutorState] = []
        self.everyone = 0  # The members.
        self.membership = 0  # Joins and leaves so far: what was computed from positions or names is old then.
        self.serving = 0  # They take requests, or will when a trial there is over.
        self.open = 0  # They take requests.
        self.seated = 0  # They take requests and have a seat for somebody.
        self.shared = 0  # They take requests and have a seat for everybody, above the reserve.
        self.slotted = 0  # They take requests and have a slot for a version without a claim there.
        self.unfilled = 0  # They have a slot that no version is in, whether they take requests or not.
        self.unknown = 0  # They have not said yet what they can hold.
        self.seats = Levels(0)
        self.slots = Levels(0)
        self.lengths: tuple[int, ...] = ()  # What executors take at most, all that were ever told, sorted.
        self.grown = 0  # Since it was last set to 0: they may take somebody whom they could not take before.
        self.changed = 0  # Since it was last set to 0: other slots, claims, phase, limits, or who waits cold.
        self.resized = 0  # Since it was last set to 0: other limits, or another number of pinned slots.
        self.told = 0  # They tell of somebody who waits cold.
        self.reclaimed: dict[str, None] = {}  # Versions with other claims, or claims that count otherwise.
        self._reserve = reserve_seats
        self._pinned: list[int] = []  # Slots of each.
        self._kept: list[int] = []  # Seats of each that are not for everybody.
        self._bits: dict[str, int] = {}  # By name.
        self._claims: dict[str, int] = {}
        # By tier, the closest first, then by version.
        self._copies: dict[Tier, dict[str, int]] = {tier: {} for tier in (Tier.SLOT, Tier.HOST, Tier.DISK)}
        self._tenants: dict[str, int] = {}
        self._limits: dict[Limits, int] = {}
        self._holders: dict[Needs, int] = {}
        self._former: dict[str, Limits] = {}  # Of the last ones that left, by name.
        for state in states:
            self.join(state)

    # Who is a member.

    def join(self, state: ExecutorState) -> int:
        """The position of a new member, whose name no other has."""
        if state.name in self._bits:
            raise ValueError(f"executor {state.name} is a member already")
        position = lowest(~self.everyone)
        if position == len(self.states):
            self._grow()
        bit = 1 << position
        self.states[position] = state
        self.everyone |= bit
        self.membership += 1
        self._bits[state.name] = bit
        self._former.pop(state.name, None)
        self._holders.clear()
        state.watch(self, position)
        for digest in state.digests():
            self.claim_changed(position, digest, True)
        for tenant, running in state.tenants().items():
            self.tenant_changed(position, tenant, running)
        self.copies_changed(position, state.residency.digests())
        self.limits_changed(position)
        return position

    def leave(self, position: int) -> None:
        """Its member is one no more, whatever it holds; the next that joins may get the position."""
        state, bit = self.states[position], 1 << position
        if not self.everyone & bit:
            raise ValueError(f"nobody is at position {position}")
        state.watch(None, position)
        for digest in state.digests():
            self.claim_changed(position, digest, False)
        for tenant in state.tenants():
            self.tenant_changed(position, tenant, 0)
        gone = state.residency.digests()
        self.states[position] = ExecutorState("")
        self.copies_changed(position, gone)
        self.limits_changed(position)  # Which clears the bit wherever a state without room has none.
        self.everyone &= ~bit
        self.unknown &= ~bit
        self.membership += 1
        del self._bits[state.name]
        if state.last_limits:
            self._former[state.name] = state.last_limits
            if len(self._former) > MAX_FORMER:
                del self._former[next(iter(self._former))]

    def _grow(self) -> None:
        size = len(self.states) + 1
        self.states.append(ExecutorState(""))
        self._pinned.append(0)
        self._kept.append(0)
        self.seats.grow(size)
        self.slots.grow(size)

    # What plans ask.

    def holders(self, needs: Needs) -> int:
        """Those that can run it, busy or not."""
        mask = self._holders.get(needs)
        if mask is None:
            if len(self._holders) >= MAX_CACHED_NEEDS:
                self._holders.clear()
            mask = self._holders[needs] = self._find_holders(needs)
        return mask

    def may_ever_run(self, needs: Needs) -> bool:
        """False only when every executor has said what it takes, and it fits none; nor one that left, which
        may come back. What all who are here refuse does not wait for those: they mostly stay away.
        """
        if not self.everyone or self.unknown or self.holders(needs):
            return True
        return not needs.refused and any(map(needs.fit, self._former.values()))

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer that some executor takes now; 0 when none has said."""
        return max((limits.max_model_len for limits in self._limits), default=0)

    def claims(self, digest: str) -> int:
        """Those with unfinished dispatches of a version: it has, or was promised, a slot there."""
        return self._claims.get(digest, 0)

    def settled(self, tenant: str) -> int:
        """Those where a tenant has so much running that the reserve is not for it."""
        return self._tenants.get(tenant, 0)

    def seated_for(self, tenant: str) -> int:
        """Those that take requests and have a seat for a tenant."""
        if self.shared == self.seated:
            return self.seated
        return self.shared | self.seated & ~self.settled(tenant)

    def closest(self, mask: int, digest: str) -> int:
        """Those of `mask` whose copy is closest to a slot; all of it when nobody has one."""
        for copies in self._copies.values():
            if found := copies.get(digest, 0) & mask:
                return found
        return mask

    def copies(self, digest: str, *tiers: Tier) -> int:
        """Those whose closest copy of a version is in one of these tiers."""
        mask = 0
        for tier in tiers:
            mask |= self._copies[tier].get(digest, 0)
        return mask

    def positions(self, names: Iterable[str]) -> int:
        """The mask of some names; those of nobody count for nothing."""
        mask = 0
        for name in names:
            mask |= self._bits.get(name, 0)
        return mask

    # What states tell (scheduler.fleet.watcher.Watcher).

    def state_changed(self, position: int) -> None:
        state, bit = self.states[position], 1 << position
        is_open = state.takes_requests
        if is_open != bool(self.open & bit):
            self.open ^= bit
            self._recount(state)
        self.serving = _with(self.serving, bit, state.serves)
        self.told = _with(self.told, bit, bool(state.report.cold))
        self.changed |= bit
        self.room_changed(position)

    def room_changed(self, position: int) -> None:
        state = self.states[position]
        is_open = self.open >> position & 1
        seats, slots = (state.free_seats, state.free_slots) if is_open else (0, 0)
        if seats != self.seats.rooms[position]:
            self._set_seats(position, seats)
        if slots != self.slots.rooms[position]:
            self._set_slots(position, slots)

    def limits_changed(self, position: int) -> None:
        state, bit = self.states[position], 1 << position
        for limits in [limits for limits, mask in self._limits.items() if mask & bit]:
            self._limits[limits] ^= bit
            if not self._limits[limits]:
                del self._limits[limits]
        self.unknown = _with(self.unknown, bit, state.limits is None)
        self.unfilled = _with(self.unfilled, bit, _is_unfilled(state))
        self._kept[position] = self._reserve_of(state)
        self.shared = _with(self.shared, bit, self.seats.rooms[position] > self._kept[position])
        for tenant, running in state.tenants().items():
            self.tenant_changed(position, tenant, running)
        self._holders.clear()
        self.resized |= bit
        if state.limits is not None:
            self._limits[state.limits] = self._limits.get(state.limits, 0) | bit
            if state.limits.max_model_len not in self.lengths:
                self.lengths = tuple(sorted({*self.lengths, state.limits.max_model_len}))
            self.grown |= bit
        self._recount(state)
        self.state_changed(position)

    def claim_changed(self, position: int, digest: str, claimed: bool) -> None:
        bit = 1 << position
        _mark(self._claims, digest, bit, claimed)
        self.reclaimed[digest] = None
        self.changed |= bit

    def tenant_changed(self, position: int, tenant: str, running: int) -> None:
        bit, settled = 1 << position, running >= max(1, self._kept[position])
        if settled == bool(self.settled(tenant) & bit):
            return
        _mark(self._tenants, tenant, bit, settled)
        if not settled and self.seated & bit:
            self.grown |= bit  # The reserve is for this tenant now.

    def copies_changed(self, position: int, digests: Iterable[str]) -> None:
        residency, bit = self.states[position].residency, 1 << position
        for digest in digests:
            closest = residency.tier(digest)
            for tier, copies in self._copies.items():
                _mark(copies, digest, bit, tier is closest)
        if self._pinned[position] != residency.num_pinned_in_slots:
            self._pinned[position] = residency.num_pinned_in_slots
            self.resized |= bit
        self.unfilled = _with(self.unfilled, bit, _is_unfilled(self.states[position]))
        self.changed |= bit

    def _set_seats(self, position: int, seats: int) -> None:
        """Masks change where a bound is crossed."""
        before, kept = self.seats.rooms[position], self._kept[position]
        self.seats.put(position, seats)
        if (seats > 0) != (before > 0):
            self.seated ^= 1 << position
        elif (seats > kept) == (before > kept):
            return
        if (seats > kept) != (before > kept):
            self.shared ^= 1 << position
        if seats > before:
            self.grown |= 1 << position

    def _set_slots(self, position: int, slots: int) -> None:
        before, bit = self.slots.rooms[position], 1 << position
        self.slots.put(position, slots)
        self.slotted = _with(self.slotted, bit, slots > 0)
        self.changed |= bit
        if slots and not before:
            self.grown |= bit

    def _recount(self, state: ExecutorState) -> None:
        """Claims count where requests are taken."""
        self.reclaimed.update(dict.fromkeys(state.claimed()))

    def _reserve_of(self, state: ExecutorState) -> int:
        return min(self._reserve, state.limits.max_seats // SEATS_A_RESERVED) if state.limits else 0

    def _find_holders(self, needs: Needs) -> int:
        mask = 0
        for limits, having in self._limits.items():
            if needs.fit(limits):
                mask |= having
        return mask & ~self.positions(needs.refused) if needs.refused else mask

    def check(self) -> None:
        """Raises AssertionError when a mask is not what a walk over the states finds."""
        states = self.states
        members = {state.name: 1 << at for at, state in enumerate(states) if self.everyone >> at & 1}
        assert self._bits == members and self.everyone < 1 << len(states)
        seats = [state.free_seats if state.takes_requests else 0 for state in states]
        slots = [state.free_slots if state.takes_requests else 0 for state in states]
        kept = [self._reserve_of(state) for state in states]
        assert self.open == _mask(state.takes_requests for state in states)
        assert self.serving == _mask(state.serves for state in states)
        assert self.unknown == _mask(state.limits is None for state in states) & self.everyone
        assert self.unfilled == _mask(map(_is_unfilled, states))
        assert self.seated == _mask(room > 0 for room in seats)
        assert self.shared == _mask(room > reserve for room, reserve in zip(seats, kept, strict=True))
        assert self.slotted == _mask(room > 0 for room in slots)
        self.seats.check(seats)
        self.slots.check(slots)
        for digest in self._claims.keys() | {digest for state in states for digest in state.claimed()}:
            assert self.claims(digest) == _mask(state.claims(digest) > 0 for state in states)
        for tenant in self._tenants.keys() | {name for state in states for name in state.tenants()}:
            assert self.settled(tenant) == _mask(
                state.tenants().get(tenant, 0) >= max(1, reserve)
                for state, reserve in zip(states, kept, strict=True)
            )
        copies = {digest for state in states for digest in state.residency.digests()}
        for tier, masks in self._copies.items():
            for digest in copies | masks.keys():
                there = _mask(state.residency.tier(digest) is tier for state in states)
                assert masks.get(digest, 0) == there
        for limits in {state.limits for state in states if state.limits}:
            assert self._limits[limits] == _mask(state.limits == limits for state in states)
        for needs, mask in self._holders.items():
            assert mask == self._find_holders(needs)


def _is_unfilled(state: ExecutorState) -> bool:
    return state.limits is not None and state.residency.num_in_slots < state.limits.max_loras


def _mask(found: Iterable[bool]) -> int:
    return sum(1 << position for position, here in enumerate(found) if here)


def _with(mask: int, bit: int, present: bool) -> int:
    return mask | bit if present else mask & ~bit


def _mark(masks: dict[str, int], key: str, bit: int, present: bool) -> None:
    """Sets or clears a bit; a key without any is left out."""
    if present:
        masks[key] = masks.get(key, 0) | bit
    elif mask := masks.get(key, 0) & ~bit:
        masks[key] = mask
    else:
        masks.pop(key, None)
