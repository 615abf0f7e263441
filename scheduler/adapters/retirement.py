"""What follows on this scheduler when a version leaves ACTIVE, whoever withdrew it and where.

Its accepted requests run to their end, or end with it when the withdrawal says so; then its pins end, and
executors are told to free copies that no other active name shares. They are told again for a while: another
scheduler may have had a request of it waiting, and an executor may come back with old copies. What is still
used is told in the store, for other schedulers' drains and collections (leases.py).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from concurrent.futures import Executor
from typing import TypeVar

from adapter_store import AdapterStoreError, NoticeBoard, StoreUnavailable, Summary, VersionState
from adapter_store.record import VersionEntry
from scheduler.adapters.leases import Leases, Name
from scheduler.admission.versions import Versions
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.errors import AdapterRemoved, PushedAgain
from scheduler.fleet.state import ExecutorState

TICK_S = 0.2
WATCHED_S = 120.0
DROP_EVERY_S = 2.0
LOOK_EVERY_S = 30.0
END_S = 2.0  # For the store to hear that this scheduler ends.

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Retirement:
    """On the event loop; the store is asked in `pool`.

    gone    is told of each version that has ended here
    served  those that it would be told of: others than the requests' are looked at now and then, as another
            scheduler may have withdrawn them
    """

    def __init__(
        self,
        store: NoticeBoard,
        versions: Versions,
        dispatcher: Dispatcher,
        pool: Executor,
        clock: Callable[[], float],
        gone: Callable[[str, str], None] = lambda adapter, digest: None,
        served: Callable[[], Iterable[Name]] = tuple,
    ) -> None:
        self._store, self._versions, self._dispatcher, self._pool = store, versions, dispatcher, pool
        self._clock, self._gone, self._served = clock, gone, served
        self._next_look = float("-inf")  # at what was served
        self._leases = Leases(store, pool, clock)
        self._watched: dict[Name, float] = {}  # Withdrawn versions, and until when their copies are dropped.
        self._dropped_at: dict[Name, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Before anything is accepted. Raises StoreUnavailable."""
        await self._leases.tell(-1, frozenset())
        self._task = asyncio.create_task(self._run(), name="retirement")

    async def stop(self) -> None:
        """After all requests have ended."""
        if self._task:
            self._task.cancel()
        try:
            await asyncio.wait_for(self._leases.end(), END_S)
        except (StoreUnavailable, TimeoutError) as error:
            logger.warning("other schedulers wait until the lease of this one runs out: %r", error)

    def withdrawn(self, adapter: str, digest: str) -> None:
        """Somebody withdrew it through this scheduler."""
        self._watched[adapter, digest] = self._clock() + WATCHED_S

    async def drained(self, adapter: str, digest: str) -> None:
        """Waits until no scheduler has a request of a withdrawn version and no connected executor a copy that
        is there for it alone. Raises PushedAgain when it takes requests again, StoreUnavailable.

        Each executor is told to drop it after the last request, whether or not it told of a copy: a load that
        is under way, or that a hint asked for, is in no report yet."""
        name = (adapter, digest)
        told: set[tuple[ExecutorState, int]] = set()  # Each with its stream; who comes back is another.
        self.withdrawn(adapter, digest)
        since = await self._leases.changes()
        while True:
            used = await self._leases.used(since)
            if used is not None and name not in used:
                others = {other for other, used_digest in used if used_digest == digest}
                if others or await self.sharers(adapter, digest):
                    return
                told |= self._drop_where_untold(name, told)
                if not any(state.may_hold(digest) for state in self._dispatcher.fleet.states):
                    return
            else:
                told.clear()
            entry = (await self._in_pool(self._entries, [name])).get(name)
            if entry is not None and entry.state is VersionState.ACTIVE:
                raise PushedAgain(adapter, digest)
            await asyncio.sleep(TICK_S)

    async def needed(self, resident: Container[str]) -> Callable[[Summary], bool]:
        """Whether a deleted version has to stay: a scheduler has accepted requests of it, or executors have
        copies that are there for it alone. Blocking. Raises StoreUnavailable."""
        used = await self._leases.all_used()

        def is_needed(summary: Summary) -> bool:
            if (f"{summary.tenant}/{summary.name}", summary.digest) in used:
                return True
            return summary.digest in resident and not self._store.active_names(summary.digest)

        return is_needed

    async def sharers(self, adapter: str, digest: str) -> list[str]:
        """Other active names with the same content: its copies are theirs, too. Raises StoreUnavailable."""
        names = await self._in_pool(self._store.active_names, digest)
        return [other for tenant, name in names if (other := f"{tenant}/{name}") != adapter]

    async def tick(self) -> None:
        seen, live = (
            self._versions.number,
            self._dispatcher.live_versions(),
        )  # Both before any record is read.
        pinned = self._dispatcher.fleet.pinned()
        names = [*dict.fromkeys([*live, *self._watched, *pinned, *self._served_if_due()])]
        entries = await self._in_pool(self._entries, names) if names else {}
        await self._tell(seen, live, entries)
        for name, entry in entries.items():
            if entry is not None and entry.state is VersionState.ACTIVE:
                self._watched.pop(name, None)
                self._dropped_at.pop(name, None)
            else:
                await self._retire(name, entry, live)

    def _served_if_due(self) -> Iterable[Name]:
        if self._clock() < self._next_look:
            return ()
        self._next_look = self._clock() + LOOK_EVERY_S
        return self._served()

    def _entries(self, names: list[Name]) -> dict[Name, VersionEntry | None]:
        """The entries of those that can be known now. None: the store has it no more."""
        found: dict[Name, VersionEntry | None] = {}
        for adapter, digest in names:
            tenant, _, name = adapter.partition("/")
            try:
                found[adapter, digest] = self._versions.entry(tenant, name, digest)
            except AdapterStoreError as error:
                logger.debug("%s: what became of it is not known now: %s", adapter, error)
        return found

    async def _tell(
        self, seen: int, live: Collection[Name], entries: Mapping[Name, VersionEntry | None]
    ) -> None:
        """What is not known to be ACTIVE is told, too: that only makes others wait."""
        active = {name for name, entry in entries.items() if entry and entry.state is VersionState.ACTIVE}
        try:
            await self._leases.tell(seen, frozenset(live) - active)
        except StoreUnavailable as error:
            logger.debug("what is still used here cannot be told now: %s", error)

    async def _retire(self, name: Name, entry: VersionEntry | None, live: Collection[Name]) -> None:
        adapter, digest = name
        now = self._clock()
        until = self._watched.setdefault(name, now + WATCHED_S)
        if entry is not None and entry.ends_requests:
            self._dispatcher.fail_version(adapter, digest, AdapterRemoved(adapter, digest))
        if name in live:
            self._watched[name] = now + WATCHED_S
            return
        await self._free(name, live, now)
        if now >= until:
            del self._watched[name]
            self._dropped_at.pop(name, None)
            self._gone(adapter, digest)

    async def _free(self, name: Name, live: Collection[Name], now: float) -> None:
        """Its pins, and copies unless others need them."""
        adapter, digest = name
        pinned, holders = name in self._dispatcher.fleet.pinned(), self._holders(digest)
        due = now - self._dropped_at.get(name, float("-inf")) >= DROP_EVERY_S
        if not (pinned or (holders and due)):
            return
        self._dropped_at[name] = now
        if any(digest == used for _, used in live) or await self.sharers(adapter, digest):
            self._dispatcher.fleet.unpin(digest, adapter)
        else:
            self._dispatcher.fleet.drop(digest, adapter)

    def _drop_where_untold(
        self, name: Name, told: Collection[tuple[ExecutorState, int]]
    ) -> set[tuple[ExecutorState, int]]:
        adapter, digest = name
        fleet = self._dispatcher.fleet
        connected = {(state, state.streams) for state in fleet.states if state.limits}
        untold = connected.difference(told)
        if untold:
            fleet.drop(digest, adapter, [state.name for state, _ in untold])
        return untold

    def _holders(self, digest: str) -> list[str]:
        states = self._dispatcher.fleet.states
        return [state.name for state in states if state.residency.copies_of(digest)]

    async def _in_pool(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except StoreUnavailable as error:
                logger.debug("withdrawn versions are looked at later: %s", error)
            except Exception:
                logger.exception("a look at withdrawn versions failed; the next one tries again")
