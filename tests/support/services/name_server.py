"""A name server whose records tests change: answers over UDP and TCP, to be asked anew each time."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

UDP_BYTES = 512


class NameServer(asyncio.DatagramProtocol):
    """`put` says what a name means now. A name without records is NXDOMAIN.

    rcode      what every question is answered with, in place of records: "SERVFAIL", "REFUSED" ...
    unable     types of records that it cannot tell: SERVFAIL
    is_silent  no question is answered
    asked      questions so far, by (name, type)
    over_tcp   how many of them came over TCP
    """

    def __init__(self) -> None:
        self.rcode = ""
        self.unable: frozenset[str] = frozenset()
        self.is_silent = False
        self.brings_addresses = True  # Of SRV records' targets, with their answer.
        self.asked: list[tuple[str, str]] = []
        self.over_tcp = 0
        self.port = 0
        self._records: dict[str, dict[str, list[str]]] = {}
        self._transport: asyncio.DatagramTransport | None = None

    @property
    def authority(self) -> str:
        """As gRPC and `--executor` have it in dns://<authority>/name:port."""
        return f"127.0.0.1:{self.port}"

    def target(self, name: str, port: int) -> str:
        return f"dns://{self.authority}/{name}:{port}"

    def put(self, name: str, kind: str, records: Sequence[str]) -> None:
        """The records of one type, as texts of a zone file; none of any type: there is no such name."""
        kinds = self._records.setdefault(name, {})
        kinds[kind] = list(records)
        if not any(kinds.values()):
            del self._records[name]

    def answer(self, data: bytes, max_bytes: int) -> bytes:
        """RFC 1035. What does not fit is left out, and said to be."""
        query = dns.message.from_wire(data)
        [question] = query.question
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        response = dns.message.make_response(query, recursion_available=True)
        rcode = self.rcode or ("SERVFAIL" if kind in self.unable else "")
        if rcode or name not in self._records:
            response.set_rcode(dns.rcode.from_text(rcode or "NXDOMAIN"))
        elif records := self._records[name].get(kind):
            found = dns.rrset.from_text(question.name, 0, "IN", kind, *records)
            response.answer.append(found)
            if kind == "SRV" and self.brings_addresses:
                response.additional += [
                    dns.rrset.from_text(target, 0, "IN", "A", *addresses)
                    for target in {record.target.to_text() for record in found}
                    if (addresses := self._records.get(target.removesuffix("."), {}).get("A"))
                ]
        wire = response.to_wire(max_size=65535)
        if len(wire) > max_bytes:
            response.answer, response.additional = [], []
            response.flags |= dns.flags.TC
            wire = response.to_wire()
        return wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if not self.is_silent and self._transport:
            self._transport.sendto(self.answer(data, UDP_BYTES), addr)

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One question."""
        [length] = struct.unpack("!H", await reader.readexactly(2))
        answer = self.answer(await reader.readexactly(length), 65535)
        self.over_tcp += 1
        writer.write(struct.pack("!H", len(answer)) + answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """On one port of loopback for both."""
    names = NameServer()
    tcp = await asyncio.start_server(names.serve_tcp, "127.0.0.1", 0)
    names.port = tcp.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    udp, _ = await loop.create_datagram_endpoint(lambda: names, local_addr=("127.0.0.1", names.port))
    try:
        yield names
    finally:
        udp.close()
        tcp.close()
