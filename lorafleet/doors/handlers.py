"""Adds services to a server, each method behind a door."""

from collections.abc import Mapping, Sequence

import grpc

from lorafleet.doors.door import Door


class Handlers:
    """In place of the server, for the generated `add_...Servicer_to_server`: they tell every method twice."""

    def __init__(self, server: grpc.aio.Server, door: Door) -> None:
        self._server = server
        self._door = door

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Left out: a server of ours finds registered methods only (paths.py says why)."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        wrapped = {name: self._door.wrap(f"/{service}/{name}", each) for name, each in handlers.items()}
        written = {name: each for name, each in wrapped.items() if each is not None}
        self._server.add_registered_method_handlers(service, written)
