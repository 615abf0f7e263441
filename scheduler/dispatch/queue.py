"""The requests that wait: by version and needs, within that by tenant, in fair order. Pure.

Tenants share the fleet by virtual tokens, divided by their weights, and the versions of one tenant share what
it gets in the same way (shares.py). Within a tenant a higher priority goes before that; priorities age.

A lane keeps its tenants in a heap by turn. Turns only get later by themselves, as tokens are charged: what
stands in a heap is a lower bound, and is put right when it comes up. What makes a turn earlier (an arrival, a
return, an aged priority) is entered anew.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Literal

from scheduler.dispatch.groups import Group, Lane, Tenant, Turn, Waiting
from scheduler.dispatch.shares import Shares
from scheduler.fleet.needs import ANY_LENGTH, Needs


class Queue:
    """Bounded at `add`; what comes back through `put_back` was accepted before and is always taken."""

    def __init__(
        self,
        max_total: int,
        max_per_tenant: int | Callable[[str], float],
        prompt_token_price: float = 0.5,
        priority_aging_s: float = 5.0,
        weights: Mapping[str, float] | Callable[[str], float] | None = None,
    ) -> None:
        """A prompt token costs `prompt_token_price`, a generated one 1. For each `priority_aging_s` that it
        waits a request counts as one higher, up to the highest priority that its tenant has waiting; 0 is
        never. Tenants without a weight have 1. Bounds and weights of tenants may change at any time."""
        self.fresh: dict[Lane, None] = {}  # Where a turn came up anew, until the policy has seen it.
        # Whether a lane waits for more than a seat: the policy says.
        self.is_blocked: Callable[[Lane], bool] = lambda lane: False
        self.lengths: tuple[int, ...] = ()  # What `Needs.max_length` is rounded up to, sorted.
        self.max_total = max_total
        self._most_of = max_per_tenant if callable(max_per_tenant) else lambda tenant: max_per_tenant
        self._price = prompt_token_price
        self._aging_s = priority_aging_s
        self._weight_of = weights if callable(weights) else partial(_listed, weights or {})
        self._now = 0.0  # Of the last `age`: levels change only there.
        self._serials = count(1)
        self._requests: dict[int, Waiting] = {}
        self._groups: dict[int, Group] = {}  # By request.
        self._tenants: dict[str, Tenant] = {}
        self.tenants: Mapping[str, Tenant] = self._tenants  # For reading: those with waiting requests.
        # Tenants with several priorities, or that had them at the last `age`.
        self._aging: dict[str, None] = {}
        self._lanes: dict[str, dict[Needs, Lane]] = {}
        self._kinds: dict[Needs, dict[Lane, None]] = {}  # Lanes by needs, none empty.
        self._shares = Shares(self._tenant_can_progress)
        self._versions: dict[str, Shares] = {}  # By tenant: of its versions.
        self._paid: dict[int, float] = {}  # Requests that came back: what their prompts were charged.

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __getitem__(self, number: int) -> Waiting:
        return self._requests[number]

    @property
    def num_groups(self) -> int:
        return len(self._lanes)

    def group_size(self, digest: str) -> int:
        """How many wait for this version, over all tenants."""
        return sum(lane.size for lane in self.lanes(digest))

    def digests(self) -> KeysView[str]:
        """Versions that somebody waits for."""
        return self._lanes.keys()

    def lanes(self, digest: str) -> Collection[Lane]:
        """The lanes of one version."""
        return self._lanes.get(digest, {}).values()

    def all_lanes(self) -> Iterator[Lane]:
        return (lane for lanes in self._lanes.values() for lane in lanes.values())

    def needs(self, request: Waiting) -> Needs:
        """What a request asks of an executor."""
        at = bisect_left(self.lengths, request.max_length)
        return Needs(
            request.max_rank,
            request.modules,
            request.full_heads,
            self.lengths[at] if at < len(self.lengths) else ANY_LENGTH,
            request.refused,
            request.masked,
        )

    def oldest(self, lane: Lane) -> float:
        """When the request was accepted that has waited there for the longest."""
        heads = (numbers[0] for group in lane.groups.values() for numbers in group.numbers.values())
        return self._requests[min(heads)].arrived

    def all_needs(self) -> Collection[Needs]:
        """What those that wait need."""
        return self._kinds.keys()

    def lanes_with(self, needs: Needs) -> Collection[Lane]:
        return self._kinds.get(needs, {}).keys()

    def requests(self) -> Iterator[Waiting]:
        """All of them, in no useful order. Walks everything: not for every plan."""
        return iter(self._requests.values())

    def requests_in(self, lane: Lane) -> Iterator[Waiting]:
        """All of one lane, in no useful order."""
        for group in lane.groups.values():
            for numbers in group.numbers.values():
                yield from map(self._requests.__getitem__, numbers)

    def served(self, tenant: str) -> float:
        """The tenant's virtual tokens: the lowest among those that can run goes first."""
        return self._shares.of(tenant)

    # Coming and going.

    def add(self, request: Waiting, *, again: bool = False) -> Literal["total", "tenant"] | None:
        """None when it was taken, else the bound that is full."""
        full = self.full(request.tenant, again=again)
        if full is None:
            self._insert(request)
        return full

    def full(self, tenant: str, *, again: bool = False) -> Literal["total", "tenant"] | None:
        """The bound that leaves no room for a request of the tenant: twice as high if it comes `again`."""
        if len(self._requests) >= self.max_total * (1 + again):
            return "total"
        waiting = self._tenants.get(tenant)
        return "tenant" if waiting and waiting.size >= self._most_of(tenant) * (1 + again) else None

    def take(self, number: int, place: str = "") -> Waiting:
        """Removes a request that goes to an executor and charges its tenant for the prompt. `place` is the
        executor where this was the fairest turn; "" where another had to wait for it."""
        request, group = self._requests[number], self._groups[number]
        tenant, paid = group.tenant, self._paid.get(number, 0.0)
        spent = 0.0 if number in self._paid else request.cost * self._price / tenant.weight
        self._shares.serve(tenant.share, spent, paid, place)
        group.versions.serve(group.share, spent, paid, place)
        self._follow_shares(tenant)
        self._remove(request)
        return request

    def put_back(self, request: Waiting, since: float = math.inf) -> None:
        """Returns a taken request to its former place: it is charged once, and goes first for that. `since`:
        when its wait for a slot began, which goes on."""
        self._paid[request.number] = request.cost * self._price / self._weight_of(request.tenant)
        self._insert(request)
        self._groups[request.number].lane.owe(since)

    def discard(self, number: int) -> bool:
        """Removes a request that shall not run. Whether it was here."""
        request = self._requests.get(number)
        if request is None:
            return False
        self._remove(request)
        return True

    def charge(self, tenant: str, digest: str, tokens: float) -> None:
        """Adds to the shares of a tenant and of its version what was spent for them."""
        spent = tokens / self._weight_of(tenant)
        self._shares.charge(tenant, spent)
        if waiting := self._tenants.get(tenant):
            self._follow_shares(waiting)
        if versions := self._versions.get(tenant):
            versions.charge(digest, spent)

    def _follow_shares(self, tenant: Tenant) -> None:
        if len(self._tenants) > 1:
            tenant.at = tenant.share.tokens

    # Turns.

    def turn(self, lane: Lane) -> Turn | None:
        """The next turn of a lane: that of the tenant that goes first. None when nobody waits any more."""
        turns = lane.turns
        while turns:
            entered = turns[0]
            group = lane.groups.get(entered[4])
            if group is None or group.turn is not entered:
                heappop(turns)
                continue
            # Who was not charged since still has this turn: levels change only in `age`, which enters anew.
            charged = group.tenant.at != entered[0] or group.share.tokens != entered[2]
            if not charged and not group.is_ahead:
                return entered
            due = self._turn(group)
            group.is_ahead = False
            if due == entered:
                return entered
            group.turn = due
            heapreplace(turns, due)
        return None

    def turns(self, lane: Lane, limit: int) -> list[Turn]:
        """The next turns of a lane, of different tenants, in order."""
        found: list[Turn] = []
        while len(found) < limit and (turn := self.turn(lane)):
            found.append(heappop(lane.turns))
        for turn in found:
            heappush(lane.turns, turn)
        return found

    def age(self, now: float) -> None:
        """Lets priorities age, and forgets shares that say nothing any more. Walks the groups of tenants that
        have several priorities waiting."""
        self._now = now
        for tenant in [self._tenants[name] for name in self._aging if name in self._tenants]:
            tenant.cap = max(tenant.priorities)
            for group in tenant.groups:
                if self._turn(group) != group.turn:
                    group.turn = None
                    self._enter(group)
            if len(tenant.priorities) == 1:
                del self._aging[tenant.name]
        self._aging = {name: None for name in self._aging if name in self._tenants}
        if self._shares.has_many:
            self._forget_shares()

    def follow(self, lengths: tuple[int, ...]) -> None:
        """Takes the lengths that executors take, sorted. Where they are others than before, groups anew all
        that wait: versions that wait for a slot go on waiting."""
        if lengths == self.lengths:
            return
        self.lengths = lengths
        paid = dict(self._paid)
        for request in list(self._requests.values()):
            lane = self._groups[request.number].lane
            if self.needs(request) != lane.needs:
                self._remove(request)
                self._paid.update({request.number: paid[request.number]} if request.number in paid else {})
                self._insert(request)
                self._groups[request.number].lane.owe(lane.waits_since)

    def _forget_shares(self) -> None:
        self._shares.forget_all_but(self._tenants)
        self._versions = {name: kept for name, kept in self._versions.items() if name in self._shares}

    def _turn(self, group: Group) -> Turn:
        """Of the group's first request."""
        tenant = group.tenant
        if len(group.numbers) == 1:
            [(priority, numbers)] = group.numbers.items()
            number = numbers[0]
            level = priority if priority >= tenant.cap else self._level(tenant, priority, number)
        else:
            later, number = min(
                (-self._level(tenant, priority, numbers[0]), numbers[0])
                for priority, numbers in group.numbers.items()
            )
            level = -later
        paid = self._paid.get(number, 0.0)  # Before it came back: its turn is earlier by that.
        return (tenant.at - paid, -level, group.share.tokens - paid, number, tenant.name)

    def _level(self, tenant: Tenant, priority: int, number: int) -> int:
        if priority >= tenant.cap or not self._aging_s:
            return priority
        waited = max(0.0, self._now - self._requests[number].arrived)
        return min(tenant.cap, priority + int(waited / self._aging_s))

    def _enter(self, group: Group) -> None:
        """Into its lane's heap, if its turn is earlier than the entry there."""
        turn = self._turn(group)
        if group.turn is None or turn < group.turn:
            group.turn, group.is_ahead = turn, False
            heappush(group.lane.turns, turn)
            self.fresh[group.lane] = None

    def _insert(self, request: Waiting) -> None:
        number, name, priority = request.number, request.tenant, request.priority
        tenant = self._tenants.get(name)
        if tenant is None:
            share = self._shares.enter(name)
            for other in self._tenants.values() if len(self._tenants) == 1 else ():
                other.at = other.share.tokens
            tenant = self._tenants[name] = Tenant(name, self._weight_of, share, cap=priority, at=share.tokens)
        lanes = self._lanes.setdefault(request.digest, {})
        needs = self.needs(request)
        lane = lanes.get(needs)
        if lane is None:
            lane = lanes[needs] = Lane(request.digest, needs, next(self._serials))
            self._kinds.setdefault(needs, {})[lane] = None
        group = lane.groups.get(name)
        if group is None:
            versions = self._versions_of(tenant)
            with_other_needs = (other.groups[name].share for other in lanes.values() if name in other.groups)
            share = next(with_other_needs, None) or versions.enter(request.digest)
            group = lane.groups[name] = Group(tenant, lane, versions, share)
            tenant.groups[group] = None
        self._requests[number] = request
        self._groups[number] = group
        insort(group.numbers.setdefault(priority, []), number)
        lane.size += 1
        tenant.enters(request)
        if len(tenant.priorities) > 1:
            self._aging[name] = None
        self._enter(group)
        self.fresh[lane] = None

    def _versions_of(self, tenant: Tenant) -> Shares:
        versions = self._versions.get(tenant.name)
        if versions is None:
            versions = Shares(partial(self._version_can_progress, tenant.name))
            self._versions[tenant.name] = versions
        if versions.has_many:
            versions.forget_all_but({group.lane.digest for group in tenant.groups})
        return versions

    def _tenant_can_progress(self, name: str) -> bool:
        tenant = self._tenants.get(name)
        return tenant is not None and tenant.can_progress(self.is_blocked)

    def _version_can_progress(self, tenant: str, digest: str) -> bool:
        return any(tenant in lane.groups and not self.is_blocked(lane) for lane in self.lanes(digest))

    def _remove(self, request: Waiting) -> None:
        number, priority = request.number, request.priority
        del self._requests[number]
        self._paid.pop(number, None)
        group = self._groups.pop(number)
        tenant, lane = group.tenant, group.lane
        numbers = group.numbers[priority]
        del numbers[bisect_left(numbers, number)]
        if not numbers:
            del group.numbers[priority]
        group.is_ahead |= group.turn is not None and group.turn[3] == number
        if not group.numbers:
            del lane.groups[tenant.name]
            del tenant.groups[group]
        lane.size -= 1
        if not lane.size:
            self._remove_lane(lane)
        tenant.leaves(request)
        if not tenant.size:
            del self._tenants[tenant.name]

    def _remove_lane(self, lane: Lane) -> None:
        lanes = self._lanes[lane.digest]
        del lanes[lane.needs]
        if not lanes:
            del self._lanes[lane.digest]
        del self._kinds[lane.needs][lane]
        if not self._kinds[lane.needs]:
            del self._kinds[lane.needs]
        lane.turns.clear()
        self.fresh.pop(lane, None)

    def check(self) -> None:
        """Raises AssertionError when an index disagrees with the requests."""
        lanes = list(self.all_lanes())
        assert sum(lane.size for lane in lanes) == len(self._requests) == len(self._groups)
        assert self._paid.keys() <= self._requests.keys() and self.fresh.keys() <= set(lanes)
        assert {lane for kind in self._kinds.values() for lane in kind} == set(lanes)
        assert all(lane.needs == needs for needs, kind in self._kinds.items() for lane in kind)
        for tenant in self._tenants.values():
            own = [request for request in self._requests.values() if request.tenant == tenant.name]
            assert tenant.size == len(own) > 0
            assert tenant.most == sum(request.most for request in own)
            assert tenant.at == self._shares.of(tenant.name) or len(self._tenants) == 1
            assert tenant.priorities == Counter(request.priority for request in own)
            assert len(tenant.priorities) == 1 or tenant.name in self._aging
            assert all(group.lane.groups[tenant.name] is group for group in tenant.groups)
        for lane in lanes:
            assert lane.size and self._lanes[lane.digest][lane.needs] is lane
            self._check_groups(lane.groups.values())
            numbers = [request.number for request in self.requests_in(lane)]
            assert lane.size == len(numbers) == len(set(numbers))
            assert self.turn(lane) == min(self._turn(group) for group in lane.groups.values())

    def _check_groups(self, groups: Iterable[Group]) -> None:
        for group in groups:
            assert group in group.tenant.groups and group.numbers
            assert group.turn is not None and group.turn in group.lane.turns
            for priority, numbers in group.numbers.items():
                assert numbers == sorted(numbers)
                for request in map(self._requests.__getitem__, numbers):
                    assert request.priority == priority and self._groups[request.number] is group
                    assert (request.tenant, request.digest) == (group.tenant.name, group.lane.digest)
                    assert self.needs(request) == group.lane.needs


def _listed(weights: Mapping[str, float], tenant: str) -> float:
    return weights.get(tenant, 1.0)
