"""HTTP/2 by hand, as only a hostile client speaks it: frames go out whatever the other side says."""

import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
CANCEL = 8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NO_WINDOW = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE

Metadata = Sequence[tuple[str, str]]


class Connection:
    """One connection. What the server says is read and dropped, so that it never waits for us."""

    def __init__(self, address: str, *, reads: bool = True) -> None:
        """reads: takes the bodies of answers; without, no byte of one may be sent."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._socket.sendall(_PREFACE + _frame(SETTINGS, 0, 0, b"" if reads else _NO_WINDOW))
        self._reader = threading.Thread(target=self._drop_all, daemon=True)
        self._reader.start()
        self._next = 1

    def call(self, method: str, metadata: Metadata = ()) -> tuple[int, bytes]:
        """A new stream's number and the frame that opens it."""
        stream, self._next = self._next, self._next + 2
        return stream, _frame(HEADERS, END_HEADERS, stream, _headers(method, metadata))

    def send(self, frames: Iterable[bytes]) -> None:
        """Raises OSError when the other side has closed."""
        self._socket.sendall(b"".join(frames))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Or it stays open while the reader waits.
        self._socket.close()

    def _drop_all(self) -> None:
        try:
            while self._socket.recv(1 << 16):
                pass
        except OSError:
            return


def message(stream: int, body: bytes, *, announced: int | None = None, end: bool = True) -> bytes:
    """One gRPC message as a frame; `announced` is another length than the body's."""
    prefix = struct.pack(">BI", 0, len(body) if announced is None else announced)
    return _frame(DATA, END_STREAM if end else 0, stream, prefix + body)


def reset(stream: int) -> bytes:
    return _frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(method: str, metadata: Metadata) -> bytes:
    """HPACK without tables: each a literal that is not indexed."""
    pseudo = ((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "fuzz"))
    fixed = (("te", "trailers"), ("content-type", "application/grpc"))
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in (*pseudo, *fixed, *metadata))


def _string(text: str) -> bytes:
    raw = text.encode()
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    rest, length = len(raw) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + raw
