"""All accepted requests until they end: found by name, by queue number or by running attempt."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator

from scheduler.dispatch.live_request import LiveRequest


class LiveRequests:
    """Requests from their acceptance to their end, by caller's name, by queue number, by running attempt."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], LiveRequest] = {}
        self._by_number: dict[int, LiveRequest] = {}
        self._by_dispatch: dict[str, LiveRequest] = {}
        self._versions = Counter[tuple[str, str]]()
        self._tenants = Counter[str]()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[LiveRequest]:
        """As they are now: they may end while this is walked."""
        return iter(list(self._by_number.values()))

    def __getitem__(self, number: int) -> LiveRequest:
        return self._by_number[number]

    def named(self, key: tuple[str, str]) -> LiveRequest | None:
        return self._by_key.get(key)

    def running(self, dispatch_id: str) -> LiveRequest | None:
        """The request of an attempt that is not over."""
        return self._by_dispatch.get(dispatch_id)

    def versions(self) -> Counter[tuple[str, str]]:
        """How many there are of each ("tenant/name", digest)."""
        return self._versions.copy()

    def of_tenant(self, tenant: str) -> int:
        """How many a tenant has."""
        return self._tenants[tenant]

    def of_version(self, adapter: str, digest: str) -> list[LiveRequest]:
        return [live for live in self if live.version == (adapter, digest)]

    def add(self, live: LiveRequest) -> None:
        self._by_key[live.key] = live
        self._by_number[live.waiting.number] = live
        if live.admitted.digest:
            self._versions[live.version] += 1
        self._tenants[live.waiting.tenant] += 1
        self._empty.clear()

    def remove(self, live: LiveRequest) -> None:
        """Its attempt, if one runs, is over before."""
        del self._by_number[live.waiting.number]
        if self._by_key[live.key] is live:
            del self._by_key[live.key]
        if live.admitted.digest:
            self._versions[live.version] -= 1
            if not self._versions[live.version]:
                del self._versions[live.version]
        self._tenants[live.waiting.tenant] -= 1
        if not self._tenants[live.waiting.tenant]:
            del self._tenants[live.waiting.tenant]
        if not self._by_number:
            self._empty.set()

    def begin_attempt(self, live: LiveRequest, dispatch_id: str, address: str) -> None:
        live.dispatch_id, live.address, live.proven = dispatch_id, address, False
        self._by_dispatch[dispatch_id] = live

    def end_attempt(self, live: LiveRequest) -> None:
        """Nothing when none runs."""
        self._by_dispatch.pop(live.dispatch_id, None)
        live.dispatch_id = ""

    def any_unproven(self, address: str) -> bool:
        """Whether an attempt runs there that has had no token yet. Walks all that run."""
        return any(live.address == address and not live.proven for live in self._by_dispatch.values())

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def check(self, waiting: Collection[int], sent: Collection[str]) -> None:
        """Raises AssertionError when a request is in two places, in none, or left behind.

        `waiting` are the numbers in the queue, `sent` the attempts that executors have.
        """
        running = {live.waiting.number for live in self._by_dispatch.values()}
        paused = {number for number, live in self._by_number.items() if live.pause}
        assert len(running) + len(paused) + len(waiting) == len(running | paused | set(waiting))
        assert running | paused | set(waiting) == self._by_number.keys()
        assert all(live.dispatch_id == key for key, live in self._by_dispatch.items())
        assert set(self._by_key.values()) == set(self._by_number.values())
        assert set(sent) == self._by_dispatch.keys()
        assert self._versions == Counter(live.version for live in self if live.admitted.digest)
        assert self._tenants == Counter(live.waiting.tenant for live in self)
