"""How a service is, for anyone who asks: nobody who asks can keep the service from saying it.

The servicer that comes with gRPC writes to those who watch under the lock that a new status needs, too: one
watcher that does not read, and nothing is told any more, to nobody.
"""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MAX_WATCHERS = 512


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """A health_pb2.HealthCheckResponse.ServingStatus by the name of a service; "" is all of this one. When
    MAX_WATCHERS watch, the one that began first gives way to a new one."""

    def __init__(self, max_watchers: int = MAX_WATCHERS) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()  # Another one after each change.
        self._max_watchers = max_watchers
        self._watchers: dict[asyncio.Timeout, None] = {}

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def set(self, service: str, status: int) -> None:
        """On the event loop; it waits for nobody."""
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name is known here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(None) as watching:
                self._begin(watching)
                await self._tell_all(request.service, context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; this is the oldest call")
        finally:
            self._watchers.pop(watching, None)

    def _begin(self, watching: asyncio.Timeout) -> None:
        self._watchers[watching] = None
        if len(self._watchers) > self._max_watchers:
            first = next(iter(self._watchers))
            del self._watchers[first]
            first.reschedule(0)

    async def _tell_all(self, service: str, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            changed = self._changed  # Before the look: what changes while this one is told is looked at, too.
            status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await changed.wait()
