"""A bare client, to show what the server itself can do: plain commands, many under way, unchecked."""

import socket
from types import TracebackType
from typing import Self

CHUNK_BYTES = 4 << 20
_UNDER_WAY = 4


class RawClient:
    """Writes and reads one value cut into chunks, keyed `raw:<n>`."""

    def __init__(self, port: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ahead = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def write(self, value: memoryview) -> None:
        """Sets all chunks, then waits until they are in the append-only file."""
        starts = range(0, len(value), self._chunk_bytes)
        for number, start in enumerate(starts):
            chunk = value[start : start + self._chunk_bytes]
            self._command(b"SET", b"raw:%d" % number, chunk)
        for _ in starts:
            self._line()
        self._command(b"WAITAOF", b"1", b"0", b"60000")
        for _ in range(3):
            self._line()

    def read(self, target: memoryview) -> None:
        """Into `target`, which has the size of what was written."""
        starts, asked = range(0, len(target), self._chunk_bytes), 0
        for number, start in enumerate(starts):
            while asked < min(len(starts), number + _UNDER_WAY):
                self._command(b"GET", b"raw:%d" % asked)
                asked += 1
            self._line()
            self._receive(target[start : start + self._chunk_bytes])
            self._line()

    def delete(self, num_bytes: int) -> None:
        for number in range(-(-num_bytes // self._chunk_bytes)):
            self._command(b"UNLINK", b"raw:%d" % number)
            self._line()

    def _command(self, *parts: bytes | memoryview) -> None:
        self._socket.sendall(b"*%d\r\n" % len(parts))
        for part in parts:
            self._socket.sendall(b"$%d\r\n" % len(part))
            self._socket.sendall(part)
            self._socket.sendall(b"\r\n")

    def _line(self) -> bytes:
        while b"\r\n" not in self._ahead:
            self._ahead += self._socket.recv(4096)
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        if line.startswith(b"-"):
            raise RuntimeError(f"the server answered {line!r}")
        return bytes(line)

    def _receive(self, target: memoryview) -> None:
        done = min(len(target), len(self._ahead))
        target[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < len(target):
            done += self._socket.recv_into(target[done:])
