"""This scheduler's lease in the store, and what all schedulers' leases say (adapter_store/lease.py)."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from adapter_store import Lease, NoticeBoard
from adapter_store.lease import used_by

RENEW_S = 1.0
LOOK_S = 0.1

Name = tuple[str, str]  # "tenant/name", digest
T = TypeVar("T")


class Leases:
    """On the event loop; the store is asked in `pool`. Any method may raise StoreUnavailable."""

    def __init__(self, store: NoticeBoard, pool: Executor, clock: Callable[[], float]) -> None:
        self._store, self._pool, self._clock = store, pool, clock
        self._holder = uuid.uuid4().hex
        self._told: Lease | None = None
        self._told_at = 0.0

    async def tell(self, seen: int, used: frozenset[Name]) -> None:
        """All changes up to `seen` count here; of what had left ACTIVE by then, `used` is still used."""
        lease, now = Lease(self._holder, seen, used), self._clock()
        if lease != self._told or now - self._told_at >= RENEW_S:
            await self._run(self._store.hold, lease)
            self._told, self._told_at = lease, now

    async def end(self) -> None:
        """No accepted request is left."""
        await self._run(self._store.let_go, self._holder)

    async def changes(self) -> int:
        """The number of the last change in the store."""
        return (await self._run(self._store.news, -1)).number

    async def used(self, since: int) -> frozenset[Name] | None:
        """What any scheduler still uses of versions that left ACTIVE before the change `since`. None while
        one of them has not seen that change."""
        leases = await self._run(self._store.leases)
        return used_by(leases) if all(lease.seen >= since for lease in leases) else None

    async def all_used(self) -> frozenset[Name]:
        """The same for all changes up to now. Waits for schedulers that are late, at most until their leases
        run out."""
        since = await self.changes()
        while (used := await self.used(since)) is None:
            await asyncio.sleep(LOOK_S)
        return used

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)
