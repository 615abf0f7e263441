"""A name server for one name whose address tests move: answers over UDP, to be asked anew each time."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

A, IN = 1, 1


class NameServer(asyncio.DatagramProtocol):
    """`target(name, port)` is what a gRPC channel takes; `address` is what the name means now."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    def target(self, name: str, port: int) -> str:
        return f"dns://127.0.0.1:{self.port}/{name}:{port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """RFC 1035: the question again, and an A record that no one may keep if an IPv4 address was asked."""
        end = data.index(b"\0", 12) + 5
        question, kind = data[12:end], struct.unpack("!H", data[end - 4 : end - 2])[0]
        answers = 0
        record = b""
        if kind == A:
            self.asked += 1
            answers = 1
            record = struct.pack("!HHHIH", 0xC00C, A, IN, 0, 4) + socket.inet_aton(self.address)
        header = data[:2] + struct.pack("!HHHHH", 0x8580, 1, answers, 0, 0)
        assert self._transport
        self._transport.sendto(header + question + record, addr)


@asynccontextmanager
async def name_server(address: str) -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: NameServer(address), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
