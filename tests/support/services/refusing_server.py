"""A server behind TLS that knows no method, and remembers which were called."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from lorafleet.tls.credentials import add_port
from lorafleet.tls.files import Tls, WatchedFiles


@asynccontextmanager
async def serving(files: Tls | None) -> AsyncIterator[tuple[str, list[str]]]:
    """Its address, and the methods that were called."""
    called: list[str] = []

    class Recorder(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> None:
            called.append(details.method)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Recorder()])
    port = add_port(server, "127.0.0.1:0", WatchedFiles(files) if files else None)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", called
    finally:
        await server.stop(None)
