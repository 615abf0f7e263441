"""A port in clear that serves health and nothing else, for who cannot speak TLS: the kubelet."""

import grpc
from grpc_health.v1 import health, health_pb2_grpc

# It asks short questions; who asks more is a stranger.
_OPTIONS = (
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.so_reuseport", 0),
)


class HealthPort:
    """Made: it is bound. Started: it answers."""

    def __init__(self, servicer: health.aio.HealthServicer, host: str, port: int) -> None:
        """host: in brackets for IPv6. port: 0 is any free one. Raises RuntimeError when it cannot be had."""
        self._server = grpc.aio.server(options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.port = int(self._server.add_insecure_port(f"{host}:{port}"))

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)
