"""All executors of this scheduler: their links and states by address, and commands to them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from lorafleet.v1 import adapters_pb2, executor_pb2
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.link import ExecutorLink, LinkSettings, Listener
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import ExecutorState, Phase
from scheduler.fleet.wire import residency_rows


class Fleet:
    """Links by address. Starts connecting at `start`, lets go of everything at `stop`."""

    def __init__(
        self,
        addresses: Iterable[str],
        settings: LinkSettings,
        listener: Listener,
        awake: Callable[[], float],
        reserve_seats: int = 0,
    ) -> None:
        """`awake` is a clock in seconds that runs only while this loop is alive. `reserve_seats` of an
        executor are only for tenants with nothing running there."""
        self._links = {address: ExecutorLink(address, settings, listener, awake) for address in addresses}
        self.states: Sequence[ExecutorState] = tuple(link.state for link in self._links.values())
        self.index = FleetIndex(self.states, reserve_seats)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(link.run(), name=f"executor {address}")
            for address, link in self._links.items()
        ]

    async def stop(self) -> None:
        """Closes all streams; executors cancel what was running there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def any_ready(self) -> bool:
        """Whether requests may wait for one: it is ready, and not cordoned."""
        return any(state.serves for state in self.states)

    def refusals(self) -> str | None:
        """Why nobody can ever run anything: the reasons, when every executor was refused."""
        states = self.states
        if not states or any(state.phase is not Phase.REFUSED for state in states):
            return None
        return "; ".join(f"executor {state.address} was refused: {state.detail}" for state in states)

    def state(self, address: str) -> ExecutorState | None:
        link = self._links.get(address)
        return link.state if link else None

    def tier(self, address: str, digest: str) -> Tier:
        """Where an executor's closest copy is."""
        return self._links[address].state.residency.tier(digest)

    def promise(self, address: str, dispatch_id: str, digest: str, tenant: str) -> None:
        """Counts a dispatch that will be sent with the next `dispatch`."""
        self._links[address].state.sent(dispatch_id, digest, time.monotonic(), tenant)

    def dispatch(self, address: str, dispatches: list[executor_pb2.Dispatch]) -> None:
        """Sends what was promised."""
        self._links[address].dispatch(dispatches)

    def cancel(self, address: str, dispatch_id: str) -> None:
        self._links[address].cancel(dispatch_id)

    def prefetch(self, address: str, digest: str, need_by_s: float, expected_uses: int) -> None:
        self._links[address].prefetch(digest, need_by_s, expected_uses)

    def tell_wait(
        self, address: str, digest: str, expected_uses: int, waiting_s: float, lasts_s: float
    ) -> None:
        self._links[address].tell_wait(digest, expected_uses, waiting_s, lasts_s)

    def drop(self, digest: str, adapter: str = "", addresses: Iterable[str] = ()) -> None:
        """Ends the pins of an adapter ("tenant/name"; "": of all), and frees the copies that no other adapter
        pins, once nobody uses them: on these executors, all when none is named."""
        for link in self._chosen(addresses):
            link.drop(digest, adapter)

    def pin(self, digest: str, adapter: str, tier: Tier, addresses: Iterable[str] = ()) -> None:
        """Executors load the version and keep it while any adapter pins it; those that are away do when they
        come back."""
        for link in self._chosen(addresses):
            link.pin(digest, adapter, tier)

    def unpin(self, digest: str, adapter: str, addresses: Iterable[str] = ()) -> None:
        """Ends the pins of one adapter."""
        for link in self._chosen(addresses):
            link.unpin(digest, adapter)

    def pinned(self) -> set[tuple[str, str]]:
        """("tenant/name", digest) of all pins that were asked for here."""
        return {(adapter, digest) for link in self._links.values() for digest, adapter in link.pins}

    def missing_pins(self, address: str) -> int:
        """Versions that an executor should keep and does not. From any thread."""
        return self._links[address].missing_pins()

    def _chosen(self, addresses: Iterable[str]) -> list[ExecutorLink]:
        return [self._links[address] for address in addresses or self._links]

    def residency(self) -> list[adapters_pb2.AdapterResidency]:
        """Every copy on every executor, by executor, then digest."""
        states = sorted(self.states, key=lambda state: state.address)
        epoch = time.time() - time.monotonic()
        return [row for state in states for row in residency_rows(state, epoch)]
