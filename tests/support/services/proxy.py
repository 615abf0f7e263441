"""A TCP proxy in front of a server: slow, deaf, cutting, a black hole, or speaking TLS."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Self


class Proxy:
    """`delay(bytes)` is asked before a piece of a reply is passed on: seconds. `listen`: its port, 0: any.

    `target` is the server's port; it may change, for the connections to come."""

    def __init__(
        self,
        port: int,
        delay: Callable[[int], float] = lambda size: 0.0,
        tls: ssl.SSLContext | None = None,
        listen: int = 0,
    ) -> None:
        self.target, self._delay, self._tls = port, delay, tls
        self._listener = socket.create_server(("127.0.0.1", listen))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._swallows = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections."""
        with self._lock:
            ending, self._open = self._open, set()
        for each in ending:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """Passes nothing on any more, neither bytes nor the end of a connection, as where a machine has lost
        its power."""
        self._swallows.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        threading.Thread(target=self._copy, args=(client, server, lambda size: 0.0), daemon=True).start()
        self._copy(server, client, self._delay)

    def _copy(self, source: socket.socket, target: socket.socket, delay: Callable[[int], float]) -> None:
        try:
            while data := source.recv(1 << 16):
                time.sleep(delay(len(data)))
                if not self._swallows.is_set():
                    target.sendall(data)
        except OSError:
            pass
        if self._swallows.is_set():
            return
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
