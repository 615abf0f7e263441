"""Copies of versions on executors, as operators want them: kept, freed, and waited for."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from lorafleet.v1 import adapters_pb2
from scheduler.errors import InvalidRequest
from scheduler.fleet.fleet import Fleet
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import ExecutorState, Phase

POLL_S = 0.05
WAIT_S = 30.0


class Copies:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check(self, executors: Iterable[str]) -> None:
        """Raises InvalidRequest for one that is not an executor of this scheduler, by name or address."""
        for name in executors:
            if self._fleet.state(name) is None:
                known = ", ".join(sorted(state.name for state in self._fleet.states))
                raise InvalidRequest(
                    "executors", f"{name!r} is not an executor of this scheduler; it has {known}"
                )

    def resident(self) -> frozenset[str]:
        """Digests with a copy in host memory or a slot of any connected executor."""
        return frozenset(
            copy.digest
            for state in self._fleet.states
            for copy in state.residency.copies()
            if copy.tier >= Tier.HOST
        )

    def rows(self) -> list[adapters_pb2.AdapterResidency]:
        """Every copy on every executor, by executor, then digest."""
        return self._fleet.residency()

    def unreachable(self) -> list[str]:
        return sorted(state.name for state in self._fleet.states if state.limits is None)

    async def pin(
        self, digest: str, adapter: str, tier: Tier, executors: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Executors that hold and keep it, and those that do not after `WAIT_S`. An executor that has no room
        for it in slots keeps it in host memory."""
        self._fleet.pin(digest, adapter, tier, executors)

        def lacking() -> list[str]:
            return self._where(executors, lambda state: not _is_pinned(state, digest))

        missing = await _wait(lacking, WAIT_S)
        everywhere = self._where(executors, lambda state: True)
        return [name for name in everywhere if name not in missing], missing

    def unpin(self, digest: str, adapter: str, executors: Collection[str]) -> None:
        self._fleet.unpin(digest, adapter, executors)

    async def drop(self, digest: str, adapter: str, executors: Collection[str], shared: bool) -> list[str]:
        """Executors that still hold it after `WAIT_S`. What is `shared` with other active names stays for
        them: only this one's pins end."""
        if shared:
            self._fleet.unpin(digest, adapter, executors)
            return self.holders(digest, executors)
        self._fleet.drop(digest, adapter, executors)
        return await _wait(lambda: self.holders(digest, executors), WAIT_S)

    def holders(self, digest: str, executors: Collection[str]) -> list[str]:
        """Those of the executors that have a copy, or may still get one."""
        return self._where(executors, lambda state: state.may_hold(digest))

    def _where(self, executors: Collection[str], holds: Callable[[ExecutorState], bool]) -> list[str]:
        states: Sequence[ExecutorState] = self._fleet.states
        chosen = (each for each in states if not executors or {each.name, each.address} & {*executors})
        return sorted(state.name for state in chosen if holds(state))


def _is_pinned(state: ExecutorState, digest: str) -> bool:
    if state.phase in (Phase.REFUSED, Phase.CONNECTING):
        return False
    return state.residency.keeps(digest)


async def _wait(left: Callable[[], list[str]], wait_s: float) -> list[str]:
    """Until nothing is left, or for so long."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_s
    while (remaining := left()) and loop.time() < give_up:
        await asyncio.sleep(POLL_S)
    return remaining
