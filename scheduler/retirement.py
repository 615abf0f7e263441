"""What follows on this scheduler when a version leaves ACTIVE, whoever withdrew it and where.

Its accepted requests run to their end, or end with it when the withdrawal says so; then executors are told
to free their copies. They are told again for a while: another scheduler may have had a request of it waiting,
and an executor may come back with old copies.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from adapter_store import AdapterStoreError, VersionState
from adapter_store.record import VersionEntry
from scheduler.dispatcher import Dispatcher
from scheduler.errors import AdapterRemoved
from scheduler.residency import Tier
from scheduler.versions import Versions

TICK_S = 0.2
WATCHED_S = 120.0
DROP_EVERY_S = 2.0

logger = logging.getLogger(__name__)

Name = tuple[str, str]  # "tenant/name", digest


class Retirement:
    """On the event loop; records are read in `pool`. `gone` is told of each version that has ended here."""

    def __init__(
        self,
        versions: Versions,
        dispatcher: Dispatcher,
        pool: Executor,
        clock: Callable[[], float],
        gone: Callable[[str, str], None] = lambda adapter, digest: None,
    ) -> None:
        self._versions, self._dispatcher, self._pool = versions, dispatcher, pool
        self._clock, self._gone = clock, gone
        self._watched: dict[Name, float] = {}  # Withdrawn versions, and until when their copies are dropped.
        self._dropped_at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="retirement")

    def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def withdrawn(self, adapter: str, digest: str) -> None:
        """Somebody withdrew it through this scheduler."""
        self._watched[adapter, digest] = self._clock() + WATCHED_S

    async def settled(self, adapter: str, digest: str) -> None:
        """Waits until no scheduler admits requests of a withdrawn version any more, and none of ours runs."""
        self.withdrawn(adapter, digest)
        await asyncio.sleep(self._versions.max_staleness_s)
        while (adapter, digest) in self._dispatcher.live_versions():
            await asyncio.sleep(TICK_S)

    def live_digests(self) -> frozenset[str]:
        """Of accepted requests."""
        return frozenset(digest for _, digest in self._dispatcher.live_versions())

    async def tick(self) -> None:
        live = self._dispatcher.live_versions()
        names = [*dict.fromkeys([*live, *self._watched])]
        if not names:
            return
        entries = await asyncio.get_running_loop().run_in_executor(self._pool, self._entries, names)
        for name, entry in entries.items():
            if entry is not None and entry.state is VersionState.ACTIVE:
                self._watched.pop(name, None)
            else:
                self._retire(name, entry, live)

    def _entries(self, names: list[Name]) -> dict[Name, VersionEntry | None]:
        """Of those that can be known now. None: the store has it no more."""
        found: dict[Name, VersionEntry | None] = {}
        for adapter, digest in names:
            tenant, _, name = adapter.partition("/")
            try:
                found[adapter, digest] = self._versions.entry(tenant, name, digest)
            except AdapterStoreError as error:
                logger.debug("%s: what became of it is not known now: %s", adapter, error)
        return found

    def _retire(self, name: Name, entry: VersionEntry | None, live: Collection[Name]) -> None:
        adapter, digest = name
        now = self._clock()
        until = self._watched.setdefault(name, now + WATCHED_S)
        if entry is not None and entry.ends_requests:
            self._dispatcher.fail_version(adapter, digest, AdapterRemoved(adapter, digest))
        if name in live:
            self._watched[name] = now + WATCHED_S
            return
        if all(digest != used for _, used in live):  # Another name may have the same content.
            self._drop(digest, now)
        if now >= until:
            del self._watched[name]
            self._dropped_at.pop(digest, None)
            self._dispatcher.fleet.unpin(digest)  # An executor that is away would be told to load it again.
            self._gone(adapter, digest)

    def _drop(self, digest: str, now: float) -> None:
        if now - self._dropped_at.get(digest, float("-inf")) < DROP_EVERY_S:
            return
        holders = [
            state.address
            for state in self._dispatcher.fleet.states
            if state.residency.tier(digest) > Tier.NOWHERE
        ]
        if holders:
            self._dropped_at[digest] = now
            self._dispatcher.fleet.drop(digest, holders)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception:
                logger.exception("a look at withdrawn versions failed; the next one tries again")
