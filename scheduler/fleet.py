"""All executors of this scheduler."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import cast

from lorafleet.v1 import adapters_pb2, executor_pb2, fleet_pb2
from scheduler.executor_link import ExecutorLink, LinkSettings, Listener
from scheduler.executor_state import ExecutorState, Phase
from scheduler.executor_wire import residency_rows
from scheduler.queue import Queue
from scheduler.residency import Tier

MAX_QUEUES = 32


class Fleet:
    """Links by address. Starts connecting at `start`, lets go of everything at `stop`."""

    def __init__(self, addresses: Iterable[str], settings: LinkSettings, listener: Listener) -> None:
        self._links = {address: ExecutorLink(address, settings, listener) for address in addresses}
        self.states: Sequence[ExecutorState] = tuple(link.state for link in self._links.values())
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
        return any(state.phase is Phase.READY for state in self.states)

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

    def dispatch(self, address: str, dispatches: list[executor_pb2.Dispatch]) -> None:
        self._links[address].dispatch(dispatches)

    def cancel(self, address: str, dispatch_id: str) -> None:
        self._links[address].cancel(dispatch_id)

    def prefetch(self, address: str, digest: str, need_by_s: float, expected_uses: int) -> None:
        self._links[address].prefetch(digest, need_by_s, expected_uses)

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

    def snapshot(self, queue: Queue) -> fleet_pb2.FleetSnapshot:
        """The fleet as Fleet.Watch tells it, beside the counts of the queue."""
        states = sorted(self.states, key=lambda state: state.address)
        sizes = sorted((-queue.group_size(digest), digest) for digest in queue.digests())[:MAX_QUEUES]
        return fleet_pb2.FleetSnapshot(
            executors=map(status, states),
            waiting=len(queue),
            groups=queue.num_groups,
            queues=[fleet_pb2.WaitingGroup(digest=digest, waiting=-size) for size, digest in sizes],
        )


def status(state: ExecutorState) -> fleet_pb2.ExecutorStatus:
    """One executor as the Fleet service tells it."""
    usage = state.usage
    page_ins = usage.page_ins
    return fleet_pb2.ExecutorStatus(
        address=state.address,
        state=cast(fleet_pb2.ExecutorState, int(state.phase)),
        detail=state.detail,
        instance_id=state.instance_id,
        cordoned=state.cordoned,
        running=state.num_running,
        free_seats=state.free_seats,
        free_kv_blocks=state.report.free_kv_blocks,
        max_loras=state.limits.max_loras if state.limits else 0,
        resident=state.residency.in_slots(),
        slot_hits=usage.hits[Tier.SLOT],
        host_hits=usage.hits[Tier.HOST],
        misses=usage.hits[Tier.DISK] + usage.hits[Tier.NOWHERE],
        page_in_mean_ms=round(1000 * sum(page_ins) / len(page_ins)) if page_ins else 0,
        page_in_max_ms=round(1000 * max(page_ins, default=0)),
        max_seats=state.limits.max_seats if state.limits else 0,
        in_host=state.residency.count(Tier.HOST),
    )
