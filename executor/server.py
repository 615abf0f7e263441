"""The gRPC server: Executor service, health, reflection. It only translates; hub.py decides."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from executor.errors import StartError
from executor.events import EngineInfo
from executor.hub import Hub, Stream
from lorafleet.doors import Door, Handlers, Health, paths
from lorafleet.doors.options import MAX_STREAMS, connection_limits
from lorafleet.keepalive import keepalive
from lorafleet.ports import check_free
from lorafleet.tls.credentials import add_port
from lorafleet.tls.files import WatchedFiles
from lorafleet.tls.health_port import HealthPort
from lorafleet.v1 import executor_pb2, executor_pb2_grpc

SERVICE = executor_pb2.DESCRIPTOR.services_by_name["Executor"].full_name
ENDS_WITH_STEPS = ("lorafleet-ends-with-steps", "true")  # StepTokens.finished
MAX_MESSAGE_BYTES = 16 << 20
OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Schedulers ping idle and silent connections; without these they would be cut off for it.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two executors on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
)

logger = logging.getLogger(__name__)


class ExecutorServicer(executor_pb2_grpc.ExecutorServicer):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.Hello:
        return self._hub.hello(await self._ready(context))

    async def Execute(
        self,
        commands: AsyncIterator[executor_pb2.ExecutorCommand],
        context: grpc.aio.ServicerContext,
    ) -> None:
        info = await self._ready(context)
        stream = self._hub.open(info, ends_with_steps=ENDS_WITH_STEPS in context.invocation_metadata())
        reader = asyncio.create_task(self._read(commands, stream))
        writer = asyncio.create_task(self._write(stream, context))
        try:
            await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            self._hub.close(stream)
            # No status can be sent while a write waits for a scheduler that does not read. Nothing but this
            # call is held then, until it reads or keepalive finds it dead.
            await writer
            if reader.done():
                reader.result()
        finally:
            self._hub.close(stream)
            reader.cancel()
            writer.cancel()
        if stream.cut_off:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "events are not read fast enough")
        if stream.engine_lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine has ended")

    async def _ready(self, context: grpc.aio.ServicerContext) -> EngineInfo:
        while (info := self._hub.info) is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        return info

    async def _read(self, commands: AsyncIterator[executor_pb2.ExecutorCommand], stream: Stream) -> None:
        async for command in commands:
            self._hub.handle(stream, command)

    async def _write(self, stream: Stream, context: grpc.aio.ServicerContext) -> None:
        while (event := await stream.outbox.get()) is not None:
            await context.write(event)


class HealthBoard:
    """What the health service says: "" is liveness, the service's name is readiness."""

    def __init__(self) -> None:
        self.servicer = Health()

    def set(self, *, alive: bool, ready: bool) -> None:
        for name, holds in (("", alive), (SERVICE, alive and ready)):
            status = health_pb2.HealthCheckResponse.SERVING if holds else _NOT_SERVING
            self.servicer.set(name, status)


_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def make_server(
    listen: str,
    servicer: ExecutorServicer,
    board: HealthBoard,
    door: Door,
    *,
    keepalive_time_s: float,
    max_connections: int,
    tls: WatchedFiles | None,
) -> tuple[grpc.aio.Server, int]:
    """A server, not started, and its port. A scheduler that says nothing for `keepalive_time_s` is pinged;
    its streams end when it does not answer for as long again. It speaks in clear without `tls`. Raises
    StartError when the address cannot be had."""
    _check_free(listen)
    pings = keepalive(keepalive_time_s, keepalive_time_s)
    limits = connection_limits(MAX_STREAMS, max_connections)
    server = paths.make_server((*OPTIONS, *pings, *limits))
    handlers = Handlers(server, door)
    executor_pb2_grpc.add_ExecutorServicer_to_server(servicer, handlers)
    health_pb2_grpc.add_HealthServicer_to_server(board.servicer, handlers)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(names), handlers
    )
    try:
        port = add_port(server, listen, tls)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {listen}: the address is taken or not of this host") from error
    return server, port


def make_health_port(board: HealthBoard, host: str, port: int) -> HealthPort:
    """Not started. Raises StartError."""
    address = f"{host}:{port}"
    _check_free(address)
    try:
        return HealthPort(board.servicer, host, port)
    except RuntimeError as error:
        raise StartError(f"cannot serve health on {address}: the address is taken") from error


def _check_free(listen: str) -> None:
    """Raises StartError."""
    host, _, port = listen.rpartition(":")
    try:
        check_free(host.strip("[]"), int(port))
    except OSError as error:
        raise StartError(f"cannot listen on {listen}: {error.strerror}") from error
