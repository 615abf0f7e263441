"""The Fleet service: what cluster owners see and do."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc
from scheduler.auth import ADMIN, Authenticator
from scheduler.dispatcher import Dispatcher
from scheduler.errors import InvalidRequest
from scheduler.executor_state import ExecutorState
from scheduler.fleet import status
from scheduler.lookup import require
from scheduler.status import translate_errors

DEFAULT_INTERVAL_MS = 1000
POLL_S = 0.05


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Everything needs the right "admin"."""

    def __init__(self, authenticator: Authenticator, dispatcher: Dispatcher) -> None:
        self._authenticator = authenticator
        self._dispatcher = dispatcher

    @translate_errors
    async def Watch(
        self, request: fleet_pb2.WatchFleetRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetSnapshot]:
        self._authorize(context, "watching the fleet")
        last = None
        while True:
            snapshot = self._dispatcher.fleet.snapshot(self._dispatcher.queue)
            if snapshot != last:
                yield snapshot
                last = snapshot
            await asyncio.sleep((request.interval_ms or DEFAULT_INTERVAL_MS) / 1000)

    @translate_errors
    async def Cordon(
        self, request: fleet_pb2.CordonRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.CordonResponse:
        self._authorize(context, "cordoning an executor")
        state = self._state(request.address)
        state.cordoned = request.cordoned
        self._dispatcher.on_room()
        return fleet_pb2.CordonResponse(executor=status(state))

    @translate_errors
    async def Drain(
        self, request: fleet_pb2.DrainExecutorRequest, context: grpc.aio.ServicerContext
    ) -> fleet_pb2.DrainExecutorResponse:
        self._authorize(context, "draining an executor")
        state = self._state(request.address)
        state.cordoned = True
        while state.num_running:
            await asyncio.sleep(POLL_S)
        return fleet_pb2.DrainExecutorResponse(executor=status(state))

    def _authorize(self, context: grpc.aio.ServicerContext, what: str) -> None:
        require(self._authenticator.identify(context.invocation_metadata()), ADMIN, what)

    def _state(self, address: str) -> ExecutorState:
        state = self._dispatcher.fleet.state(address)
        if state is None:
            known = ", ".join(state.address for state in self._dispatcher.fleet.states)
            raise InvalidRequest(
                "address", f"{address!r} is not an executor of this scheduler; it has {known}"
            )
        return state
