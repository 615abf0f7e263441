"""A connection to the primary for bulk data, which is sent and received without a copy in between."""

import itertools
import socket
import ssl
from collections import deque
from types import TracebackType
from typing import Any, Self, cast

import redis
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

_LINE_BYTES = 4096  # what is read ahead with a reply's first line: little of a bulk passes through here
_PARTS = 1024  # that the system sends in one call
_ERRORS: dict[str, type[ResponseError]] = {
    "READONLY": ReadOnlyError,
    "CLUSTERDOWN": ClusterDownError,
    "TRYAGAIN": TryAgainError,
    "OOM": OutOfMemoryError,
    "MOVED": AskError,
    "ASK": AskError,
}


class Channel:
    """Commands out, replies in, in order. At its end the connection goes back to the pool only when every
    reply was read: no reply can ever reach the connection's next user."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        """Raises RedisError, OSError."""
        self._pool = pool
        self._connection: Any = pool.get_connection()
        # redis-py has connected, logged in and read all replies; from here on the socket is ours.
        self._socket = cast(socket.socket, self._connection._sock)
        self._ahead = memoryview(bytearray(_LINE_BYTES))
        self._begin, self._end = 0, 0  # of what was read ahead
        self._awaited = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._awaited:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def send(self, *parts: bytes | memoryview) -> None:
        """One command, as it goes over the wire."""
        self._awaited += 1  # from the first byte on
        if isinstance(self._socket, ssl.SSLSocket):
            for part in parts:
                self._socket.sendall(part)
            return
        rest = deque(memoryview(part) for part in parts)
        while rest:
            sent = self._socket.sendmsg(itertools.islice(rest, _PARTS))
            while rest and sent >= len(rest[0]):
                sent -= len(rest.popleft())
            if sent:
                rest[0] = rest[0][sent:]

    def status(self) -> None:
        """Reads a reply that says nothing but yes. Raises ResponseError when the server says no."""
        self._line()
        self._awaited -= 1

    def bulk_into(self, target: memoryview) -> bool:
        """Reads a value. False: there is none, or it is not as long as `target`."""
        line = self._line()
        length = int(line[1:]) if line.startswith(b"$") else -1
        if length != len(target):
            return False  # and its bytes stay unread: the connection is given up
        ahead = min(length, self._end - self._begin)
        target[:ahead] = self._ahead[self._begin : self._begin + ahead]
        self._begin += ahead
        while ahead < length:
            ahead += self._receive(target[ahead:])
        self._line()
        self._awaited -= 1
        return True

    def _line(self) -> bytes:
        while (line := self._find_line()) is None:
            rest = self._end - self._begin
            self._ahead[:rest] = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, rest
            self._end += self._receive(self._ahead[rest:])
        if line.startswith(b"-"):
            code, _, text = line[1:].decode(errors="replace").partition(" ")
            kind = _ERRORS.get(code)
            self._awaited -= 1
            raise kind(text) if kind is not None else ResponseError(f"{code} {text}")
        return line

    def _find_line(self) -> bytes | None:
        found = bytes(self._ahead[self._begin : self._end])
        line, end, _ = found.partition(b"\r\n")
        if not end:
            return None
        self._begin += len(line) + 2
        return line

    def _receive(self, target: memoryview) -> int:
        if (count := int(self._socket.recv_into(target))) == 0:
            raise ConnectionError("the server closed the connection, or sent no reply of a known form")
        return count
