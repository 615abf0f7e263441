"""The Fleet service: what cluster owners see and do."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import cast

import grpc

from lorafleet.doors.held import Held
from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc
from scheduler import audit
from scheduler.admission.identity import OPERATE
from scheduler.admission.lookup import require
from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.dispatch.queue import Queue
from scheduler.errors import InvalidRequest, TooMuchHeld
from scheduler.fleet.fleet import Fleet
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import ExecutorState
from scheduler.rpc_errors import translate_errors

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL_MS = 1000
LEAST_INTERVAL_MS = 100
MAX_WATCHES, MAX_TENANT_WATCHES = 64, 16
POLL_S = 0.05
MAX_QUEUES = 32
_TOO_MANY = partial(TooMuchHeld, "TOO_MANY_WATCHES")
ON_TRIAL = "a request that was in flight at crashes of executors has it for itself until its first token"


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Everything needs the right "operate". Watch and Drain last, and are counted by tenant: `max_watches`
    of one at once."""

    def __init__(
        self, dispatcher: Dispatcher, max_watches: Callable[[str], int] = lambda tenant: MAX_TENANT_WATCHES
    ) -> None:
        self._dispatcher = dispatcher
        self._held = Held("watches and drains of the fleet", MAX_WATCHES, _TOO_MANY, max_watches)
        self._picture = _Picture(dispatcher)

    @translate_errors
    async def Watch(
        self, request: fleet_pb2.WatchFleetRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetSnapshot]:
        caller = audit.caller()
        require(caller, OPERATE, "watching the fleet")
        interval_s = max(request.interval_ms or DEFAULT_INTERVAL_MS, LEAST_INTERVAL_MS) / 1000
        last = None
        with self._held.one(caller.tenant):
            while True:
                now = self._picture.now()
                if now is not last:
                    yield now
                    last = now
                await asyncio.sleep(interval_s)

    @translate_errors
    async def Cordon(
        self, request: fleet_pb2.CordonRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.CordonResponse:
        require(audit.caller(), OPERATE, "cordoning an executor")
        state = self._state(request.address)
        self._cordon(state, request.cordoned, context)
        return fleet_pb2.CordonResponse(executor=status(state))

    @translate_errors
    async def Drain(
        self, request: fleet_pb2.DrainExecutorRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.DrainExecutorResponse:
        caller = audit.caller()
        require(caller, OPERATE, "draining an executor")
        state = self._state(request.address)
        with self._held.one(caller.tenant):
            self._cordon(state, True, context)
            while state.num_running:
                await asyncio.sleep(POLL_S)
        self._picture.void()
        return fleet_pb2.DrainExecutorResponse(executor=status(state))

    def _cordon(self, state: ExecutorState, cordoned: bool, context: grpc.aio.ServicerContext) -> None:
        if state.cordoned != cordoned:
            state.cordoned = cordoned
            told = "cordoned: it gets no new requests" if cordoned else "uncordoned"
            logger.warning("executor %s: %s", state.name, told)
            audit.changed(context, "cordoned" if cordoned else "uncordoned", executor=state.name)
            self._picture.void()
            self._dispatcher.on_phase()
            self._dispatcher.on_room()

    def _state(self, name: str) -> ExecutorState:
        state = self._dispatcher.fleet.state(name)
        if state is None:
            known = ", ".join(state.name for state in self._dispatcher.fleet.states)
            raise InvalidRequest("address", f"{name!r} is not an executor of this scheduler; it has {known}")
        return state


class _Picture:
    """The fleet as all its watchers see it: a look at it is as old as the least interval at most, and newer
    than what an operator did."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._last = fleet_pb2.FleetSnapshot()
        self._looked_at = float("-inf")

    def now(self) -> fleet_pb2.FleetSnapshot:
        """The same object as before where nothing has changed, and nobody's to change."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LEAST_INTERVAL_MS / 1000:
            seen = snapshot(self._dispatcher.fleet, self._dispatcher.queue)
            self._looked_at = now
            if seen != self._last:
                self._last = seen
        return self._last

    def void(self) -> None:
        """The next watcher looks anew."""
        self._looked_at = float("-inf")


def snapshot(fleet: Fleet, queue: Queue) -> fleet_pb2.FleetSnapshot:
    """The fleet as Fleet.Watch tells it, beside the counts of the queue."""
    states = sorted(fleet.states, key=lambda state: state.name)
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
        detail=state.detail or (ON_TRIAL if state.on_trial else ""),
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
        on_trial=state.on_trial,
        name=state.name,
        leaving=state.leaving,
        seat_limit=state.seat_limit or 0,
        tripped=state.tripped,
    )
