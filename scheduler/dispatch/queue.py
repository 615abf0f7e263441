"""The requests that wait: per tenant, grouped by adapter version. Pure; policy.py decides what leaves.

Tenants share the fleet by a virtual token counter each (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): tokens spent move it forward, the lowest goes first, and a tenant that comes back starts
no lower than those who kept waiting. Within a tenant: higher priority first, then arrival.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, KeysView
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request as queue and policy know it. It keeps its `number`, and so its place, when it comes back."""

    number: int  # Unique, in order of arrival.
    tenant: str
    digest: str  # BASE for the base model.
    priority: int
    cost: int  # Prompt tokens, what the tenant is charged on leaving.
    max_rank: int  # What a slot must be able to hold; 0 for the base model.
    modules: frozenset[str]
    avoid: frozenset[str] = frozenset()  # Executors where an attempt failed: the last choice.
    full_heads: int = 0  # Places for such that an executor must have.
    max_length: int = 0  # Tokens of prompt and answer that an executor must take.
    refused: frozenset[str] = frozenset()  # Executors that can never serve it.

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first within a tenant; unique."""
        return (-self.priority, self.number)


@dataclass(slots=True)
class _Tenant:
    orders: list[tuple[int, int]] = field(default_factory=list)  # Of all its requests, sorted.
    groups: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # The same by digest, none empty.


@dataclass(slots=True)
class Queue:
    """Bounded at `add`; what comes back through `put_back` was accepted before and is always taken."""

    max_total: int
    max_per_tenant: int
    _requests: dict[int, Waiting] = field(default_factory=dict)
    _tenants: dict[str, _Tenant] = field(default_factory=dict)  # Those with waiting requests.
    _served: dict[str, float] = field(default_factory=dict)  # Virtual tokens by tenant.
    _floor: float = 0.0  # Where a tenant that was away starts again.
    _digests: dict[str, int] = field(default_factory=dict)  # Waiting requests by digest, none zero.

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_groups(self) -> int:
        return len(self._digests)

    def group_size(self, digest: str) -> int:
        """How many wait for this version, over all tenants."""
        return self._digests.get(digest, 0)

    def digests(self) -> KeysView[str]:
        """Versions that somebody waits for."""
        return self._digests.keys()

    def requests(self) -> Iterator[Waiting]:
        """All of them, in no useful order. Walks everything: not for every plan."""
        return iter(self._requests.values())

    def add(self, request: Waiting) -> Literal["total", "tenant"] | None:
        """None when it was taken, else the bound that is full."""
        full = self.full(request.tenant)
        if full is None:
            self._insert(request)
        return full

    def full(self, tenant: str) -> Literal["total", "tenant"] | None:
        """The bound that leaves no room for a request of the tenant."""
        if len(self._requests) >= self.max_total:
            return "total"
        waiting = self._tenants.get(tenant)
        return "tenant" if (len(waiting.orders) if waiting else 0) >= self.max_per_tenant else None

    def take(self, number: int) -> Waiting:
        """Removes a request that goes to an executor and charges its tenant for the prompt."""
        request = self._requests[number]
        self._floor = max(self._floor, min(self._served[tenant] for tenant in self._tenants))
        self._remove(request)
        self.charge(request.tenant, request.cost)
        return request

    def put_back(self, request: Waiting) -> None:
        """Returns a taken request to its former place and refunds its tenant."""
        self.charge(request.tenant, -request.cost)
        self._insert(request)

    def discard(self, number: int) -> bool:
        """Removes a request that shall not run. Whether it was here."""
        request = self._requests.get(number)
        if request is None:
            return False
        self._remove(request)
        return True

    def charge(self, tenant: str, tokens: int) -> None:
        """Moves a tenant's counter by tokens generated for it."""
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens

    def served(self, tenant: str) -> float:
        """The tenant's counter: the lowest among those that wait goes first."""
        return self._served.get(tenant, self._floor)

    def tenants(self) -> Collection[str]:
        """Tenants with waiting requests."""
        return self._tenants.keys()

    def head(self, tenant: str) -> Waiting | None:
        """The tenant's next request."""
        entry = self._tenants.get(tenant)
        return self._requests[entry.orders[0][1]] if entry else None

    def group_head(self, tenant: str, digest: str) -> Waiting | None:
        """The tenant's next request for one version."""
        entry = self._tenants.get(tenant)
        group = entry.groups.get(digest) if entry else None
        return self._requests[group[0][1]] if group else None

    def group_heads(self, tenant: str) -> list[Waiting]:
        """The first of each of the tenant's groups, in order."""
        entry = self._tenants.get(tenant)
        if entry is None:
            return []
        return [self._requests[number] for _, number in sorted(group[0] for group in entry.groups.values())]

    def _insert(self, request: Waiting) -> None:
        entry = self._tenants.get(request.tenant)
        if entry is None:
            entry = self._tenants[request.tenant] = _Tenant()
            self._served[request.tenant] = max(self._served.get(request.tenant, 0.0), self._floor)
        self._requests[request.number] = request
        insort(entry.orders, request.order)
        insort(entry.groups.setdefault(request.digest, []), request.order)
        self._digests[request.digest] = self._digests.get(request.digest, 0) + 1

    def _remove(self, request: Waiting) -> None:
        del self._requests[request.number]
        entry = self._tenants[request.tenant]
        group = entry.groups[request.digest]
        for orders in (entry.orders, group):
            del orders[bisect_left(orders, request.order)]
        if not group:
            del entry.groups[request.digest]
        if not entry.orders:
            del self._tenants[request.tenant]
        self._digests[request.digest] -= 1
        if not self._digests[request.digest]:
            del self._digests[request.digest]

    def check(self) -> None:
        """Raises AssertionError when an index disagrees with the requests."""
        by_tenant: dict[str, list[Waiting]] = {}
        for request in self._requests.values():
            by_tenant.setdefault(request.tenant, []).append(request)
        assert by_tenant.keys() == self._tenants.keys()
        digests: dict[str, int] = {}
        for tenant, requests in by_tenant.items():
            groups: dict[str, list[tuple[int, int]]] = {}
            for order, digest in sorted((request.order, request.digest) for request in requests):
                groups.setdefault(digest, []).append(order)
                digests[digest] = digests.get(digest, 0) + 1
            assert self._tenants[tenant].groups == groups
            assert self._tenants[tenant].orders == sorted(request.order for request in requests)
            assert tenant in self._served
        assert digests == self._digests
