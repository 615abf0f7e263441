"""A port in clear that serves health and nothing else, for who cannot speak TLS: the kubelet."""

from grpc_health.v1 import health_pb2_grpc

from lorafleet.doors import Health, paths

# It asks short questions, each on a new connection; who asks more is a stranger, and must not keep it out for
# long.
_OPTIONS = (
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_allowed_incoming_connections", 1024),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


class HealthPort:
    """Made: it is bound. Started: it answers."""

    def __init__(self, servicer: Health, host: str, port: int) -> None:
        """host: in brackets for IPv6. port: 0 is any free one. Raises RuntimeError when it cannot be had."""
        self._server = paths.make_server(_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.port = int(self._server.add_insecure_port(f"{host}:{port}"))

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)
