"""A server that outlives calls whose path is no text, and shows no metadata that is none.

grpc.aio decodes the path of every call that is not of a registered method in the loop that takes calls: bytes
that are no UTF-8 end that loop, and with it the server and all of its streams, whoever sent them. So the
server here waits for the calls of each registered method, whose names it knows, and takes all others without
looking at their paths, as calls of one method that is not there.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc

_SERVICE, _METHOD = "lorafleet.none", "None"
_NO_METHOD = f"/{_SERVICE}/{_METHOD}".encode()


def _hides_metadata(record: logging.LogRecord) -> bool:
    """gRPC logs a value that is no UTF-8, which may be a token, with a traceback: as often as it is sent."""
    return not str(record.msg).startswith("Invalid encoding on")


class _PathlessServer(cygrpc.AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[object]:
        """The next call of a registered method; None asks for that of any other one."""
        if method is None:
            return asyncio.get_running_loop().create_future()  # never: its path would be decoded
        wanted = None if method == _NO_METHOD else method
        future: asyncio.Future[object] = super()._make_request_call_future(wanted)
        return future


def make_server(
    options: Sequence[tuple[str, Any]] = (), interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A server as grpc.aio.server, on the running loop. Only registered methods are found on it; how many
    there are is felt by every call, as the loop looks at what it waits for."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_hides_metadata)
    server = grpc.aio.server(options=options, interceptors=interceptors)
    loop = asyncio.get_running_loop()
    server._server = _PathlessServer(loop, None, (), tuple(interceptors), tuple(options), None)
    handler = grpc.stream_unary_rpc_method_handler(_refuse)  # whose message is not read before
    server.add_registered_method_handlers(_SERVICE, {_METHOD: handler})
    return server


async def _refuse(_: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")
