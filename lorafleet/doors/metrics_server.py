"""The HTTP server of /metrics: a bounded number of threads, whoever connects."""

import socket
import socketserver
import threading
from contextlib import suppress

import prometheus_client
from prometheus_client import CollectorRegistry

MAX_CONNECTIONS = 32
IDLE_S = 5.0  # Between two bytes of a request, or of an answer that is not read.


class MetricsServer:
    """Serves `registry` until it is closed. Each connection has a thread; when there are as many as may be,
    the one that has been silent longest is closed for a new one."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Raises OSError when the address cannot be had. `port` 0 is any free one."""
        # As many series again, for which nobody asks.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        handler = prometheus_client.MetricsHandler.factory(registry)
        # A handler's `timeout` is its connection's; `parse_request` has read all that was asked.
        bounded = type("Handler", (handler,), {"timeout": IDLE_S, "parse_request": _parse_and_stay})
        self._server = _Server((host, port), bounded)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Blocks for up to a tenth of a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._changed = threading.Condition()  # Of what follows.
        self._open: dict[socket.socket, None] = {}
        self._silent: dict[socket.socket, None] = {}  # Those that have not asked yet, the first first.
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Waits for the end of one that was silent: threads that end would add up beside the new ones."""
        with self._changed:
            if len(self._open) >= MAX_CONNECTIONS and not self._end_a_silent_one():
                request.close()
                return
            self._changed.wait_for(lambda: len(self._open) < MAX_CONNECTIONS)
            self._open[request] = self._silent[request] = None
        super().process_request(request, client_address)

    def stay(self, request: socket.socket) -> None:
        """It has asked, and is answered."""
        with self._changed:
            self._silent.pop(request, None)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._changed:
            self._open.pop(request, None)
            self._silent.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""

    def _end_a_silent_one(self) -> bool:
        for first in self._silent:
            del self._silent[first]
            with suppress(OSError):
                first.shutdown(socket.SHUT_RDWR)  # Its thread closes it.
            return True
        return False


def _parse_and_stay(handler: prometheus_client.MetricsHandler) -> bool:
    parsed = super(type(handler), handler).parse_request()
    server = handler.server
    if parsed and isinstance(server, _Server):
        server.stay(handler.connection)
    return bool(parsed)
