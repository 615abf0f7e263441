"""A proxy whose first connection answers in HTTP/2 itself, and ends its call as no server of ours would."""

import contextlib
import socket
import struct
from collections.abc import Sequence

from lorafleet.v1 import inference_pb2
from tests.support.services.proxy import Proxy

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_HEADERS, END_STREAM_AND_HEADERS = 4, 5
CALL = 1  # A client's first stream.


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def field(name: str, value: str) -> bytes:
    """A header without indexing or compression."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def accepted() -> bytes:
    """The header that tells that a request is accepted; 0x88 is `:status: 200`."""
    fields = field("content-type", "application/grpc") + field("lorafleet-accepted", "true")
    return frame(HEADERS, END_HEADERS, CALL, b"\x88" + fields)


def message(chunk: inference_pb2.GenerateChunk) -> bytes:
    content = chunk.SerializeToString()
    return frame(DATA, 0, CALL, b"\0" + struct.pack(">I", len(content)) + content)


def reset(code: int) -> bytes:
    return frame(RST_STREAM, 0, CALL, struct.pack(">I", code))


def no_trailers() -> bytes:
    return frame(DATA, 1, CALL)


def http_status(status: int) -> bytes:
    """What a proxy says in a server's place; 0x48 is `:status` with a value of its own."""
    text = str(status).encode()
    fields = b"\x48" + bytes([len(text)]) + text + field("content-type", "text/html")
    return frame(HEADERS, END_STREAM_AND_HEADERS, CALL, fields)


class DroppingProxy(Proxy):
    """`reply` answers the first call, on the first connection; all later connections reach the target."""

    def __init__(self, port: int, reply: Sequence[bytes]) -> None:
        self._reply: Sequence[bytes] | None = reply
        super().__init__(port)

    def _serve(self, client: socket.socket) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            super()._serve(client)
            return
        with contextlib.suppress(OSError), client, client.makefile("rb") as received:
            assert received.read(len(PREFACE)) == PREFACE
            client.sendall(frame(SETTINGS, 0, 0))
            while head := received.read(9):
                received.read(int.from_bytes(head[:3], "big"))
                if head[3] == HEADERS:
                    # Nothing new is taken on this connection, so the next attempt comes on another.
                    client.sendall(b"".join(reply) + frame(GOAWAY, 0, 0, struct.pack(">II", CALL, 0)))
                    received.read()
