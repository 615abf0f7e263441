"""Which waiting request goes to which executor now. Pure.

Tenants are served in the queue's fair order, each tenant's requests by priority and arrival. A request whose
version has no slot and finds none free is passed over for others that can run (nobody waits behind an
unplaceable version), but not for ever: after `aging_s` one version that holds a slot gets no more requests
until the one passed over has its place. So once passed over, a cold version starts at the latest after one
aging interval, the remaining time of the running requests of one hot version, and one load.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from scheduler.dispatch.queue import Queue, Waiting
from scheduler.fleet.residency import BASE, Tier
from scheduler.fleet.state import ExecutorState, Phase


@dataclass(frozen=True, slots=True)
class Placement:
    """Send this request to that executor."""

    number: int
    address: str


@dataclass(slots=True)
class _Room:
    """What is left of one executor while a plan is made."""

    state: ExecutorState
    seats: int
    slots: int
    claimed: set[str]  # Versions that need no further slot here.
    closed: dict[str, tuple[str, str]] = field(default_factory=dict)  # Of those, which get no more, for whom.

    def fits(self, request: Waiting) -> bool:
        if self.seats == 0 or request.digest in self.closed or not _may_take(self.state, request):
            return False
        if request.digest == BASE or request.digest in self.claimed:
            return True
        return self.slots > 0 and _can_hold(self.state, request)

    def preference(self, request: Waiting) -> tuple[bool, bool, Tier, int, int, str]:
        """Larger is better: a claimed slot, then the closest copy, then room."""
        return (
            self.state.address not in request.avoid,
            request.digest in self.claimed,
            self.state.residency.tier(request.digest),
            self.slots if request.digest != BASE else 0,
            self.seats,
            self.state.address,
        )

    def place(self, request: Waiting) -> Placement:
        self.seats -= 1
        if request.digest != BASE and request.digest not in self.claimed:
            self.slots -= 1
            self.claimed.add(request.digest)
        return Placement(request.number, self.state.address)


@dataclass(slots=True)
class _Plan:
    """One plan in the making."""

    queue: Queue
    rooms: list[_Room]
    now: float
    claimed: set[str]  # Versions that somebody waits for and that have a slot somewhere, or need none.
    placements: list[Placement] = field(default_factory=list)


@dataclass(slots=True)
class Policy:
    """Remembers between plans only since when a version is passed over at the head of its tenant."""

    aging_s: float
    _passed_over: dict[tuple[str, str], float] = field(default_factory=dict)  # By (tenant, digest).

    def room_in_s(self, state: ExecutorState) -> float:
        """Until a version that was passed over there gets a slot, about: then one is freed for it."""
        return 0.0 if state.free_slots else self.aging_s

    def plan(self, queue: Queue, executors: Iterable[ExecutorState], now: float) -> list[Placement]:
        """Takes the requests that can run now out of the queue. The caller must send every placement.

        Work is proportional to what is placed, to the tenants that wait and to the claimed versions; requests
        that cannot be placed are not walked (only where executors differ in what they hold, the heads of
        groups are). `now` is in seconds, of any monotonic clock.
        """
        rooms = [
            _Room(state, state.free_seats, state.free_slots, set(state.claimed()))
            for state in executors
            if state.takes_requests
        ]
        self._forget_gone(queue)
        claimed = {BASE}.union(*(room.claimed for room in rooms)) & queue.digests()
        plan = _Plan(queue, rooms, now, claimed)
        for request in self._overdue(plan):
            self._place(request, plan)
        turns = [(queue.served(tenant), tenant) for tenant in queue.tenants()]
        heapify(turns)
        while turns and any(room.seats for room in rooms):
            _, tenant = heappop(turns)
            choice = self._next_of(tenant, plan)
            if choice and self._place(choice, plan) and queue.head(tenant):
                heappush(turns, (queue.served(tenant), tenant))
        return plan.placements

    def _place(self, request: Waiting, plan: _Plan) -> bool:
        fitting = (room for room in plan.rooms if room.fits(request))
        room = max(fitting, key=lambda room: room.preference(request), default=None)
        if room is None:
            return False
        plan.queue.take(request.number)
        plan.placements.append(room.place(request))
        plan.claimed.add(request.digest)
        self._passed_over.pop((request.tenant, request.digest), None)
        return True

    def _forget_gone(self, queue: Queue) -> None:
        for tenant, digest in list(self._passed_over):
            if queue.group_head(tenant, digest) is None:
                del self._passed_over[tenant, digest]

    def _overdue(self, plan: _Plan) -> list[Waiting]:
        """One request of each version that was passed over for long enough, the longest first."""
        keys = sorted(self._passed_over, key=self._passed_over.__getitem__)
        old = (key for key in keys if plan.now - self._passed_over[key] >= self.aging_s)
        return [head for key in old if (head := plan.queue.group_head(*key))]

    def _next_of(self, tenant: str, plan: _Plan) -> Waiting | None:
        head = plan.queue.head(tenant)
        if head is None or any(room.fits(head) for room in plan.rooms):
            return head
        self._pass_over(head, plan.rooms, plan.now)
        if any(room.seats and room.slots for room in plan.rooms):
            candidates = plan.queue.group_heads(tenant)
        else:
            heads = (plan.queue.group_head(tenant, digest) for digest in plan.claimed)
            candidates = sorted((head for head in heads if head), key=lambda request: request.order)
        return next((item for item in candidates if any(room.fits(item) for room in plan.rooms)), None)

    def _pass_over(self, head: Waiting, rooms: list[_Room], now: float) -> None:
        """Notes that a head waits for a slot; after `aging_s`, closes a version that holds one."""
        usable = [room for room in rooms if _can_hold(room.state, head)]
        if head.digest == BASE or any(room.slots or head.digest in room.claimed for room in usable):
            return
        key = (head.tenant, head.digest)
        since = self._passed_over.setdefault(key, now)
        if now - since < self.aging_s or any(key in room.closed.values() for room in usable):
            return
        victims = [
            (room.state.claims(digest), room.state.address, digest, room)
            for room in usable
            for digest in room.claimed - room.closed.keys()
        ]
        if victims:
            # The version with the fewest running requests frees its slot first; getting none, it stays that.
            *_, digest, room = min(victims, key=lambda victim: victim[:3])
            room.closed[digest] = key


def likely_executor(digest: str, executors: Iterable[ExecutorState]) -> ExecutorState | None:
    """Where a version will probably run once there is room: the target of a prefetch hint, if any.

    None when it is in host memory or a slot of an executor already, or nobody takes requests.
    """
    ready = [state for state in executors if state.takes_requests]
    if digest == BASE or any(state.residency.tier(digest) >= Tier.HOST for state in ready):
        return None
    return max(
        ready,
        key=lambda state: (state.residency.tier(digest), state.free_slots, state.free_seats, state.address),
        default=None,
    )


def can_ever_run(request: Waiting, executors: Collection[ExecutorState]) -> bool:
    """False only when every executor has said what it takes, and the request fits none."""
    return not executors or any(state.limits is None or _can_hold(state, request) for state in executors)


def is_served(request: Waiting, executors: Iterable[ExecutorState]) -> bool:
    """Whether one of them is ready that can run it, busy or not."""
    return any(state.phase is Phase.READY and _can_hold(state, request) for state in executors)


def is_open(request: Waiting, executors: Iterable[ExecutorState]) -> bool:
    """Whether one of them takes requests now, if it has room, that can run it."""
    return any(state.takes_requests and _can_hold(state, request) for state in executors)


def _can_hold(state: ExecutorState, request: Waiting) -> bool:
    limits, needs = state.limits, (request.max_rank, request.modules, request.full_heads)
    return limits is not None and limits.can_hold(*needs) and _may_take(state, request)


def _may_take(state: ExecutorState, request: Waiting) -> bool:
    """Whatever its adapter needs."""
    is_long_enough = state.limits is not None and request.max_length <= state.limits.max_model_len
    return is_long_enough and state.address not in request.refused
