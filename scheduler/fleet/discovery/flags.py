"""`--executor` is host:port, dns:///name:port, dns://server:port/name:port, or file:path. Pure."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from scheduler.fleet.endpoint import Endpoint

DNS, FILE = "dns:", "file:"
DNS_PORT = 53
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
MAX_NAME_CHARS = 253


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name whose addresses, or whose pods by its SRV records, are executors.

    port    of addresses; 0 for a name of SRV records alone, which bring ports of their own
    server  (IP address, port) of the name server to ask; None: those of this machine
    """

    flag: str
    name: str
    port: int
    server: tuple[str, int] | None = None

    @property
    def is_service(self) -> bool:
        """Whether it is a name of SRV records, as _grpc._tcp.executors."""
        return self.name.startswith("_")


@dataclass(frozen=True, slots=True)
class File:
    """A file with an executor a line."""

    flag: str
    path: Path


def parse(flag: str) -> Endpoint | DnsName | File:
    """Raises ValueError, whose text says what is wrong with it."""
    if flag.startswith(DNS):
        return _dns_name(flag)
    if flag.startswith(FILE):
        if path := flag.removeprefix(FILE):
            return File(flag, Path(path))
        raise ValueError(f"{flag!r} names no file")
    return Endpoint(address(flag))


def address(text: str) -> str:
    """The same, with an IP address in the one form that it is compared in. Raises ValueError."""
    host, port = host_and_port(text)
    return join(host, port)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(text: str) -> tuple[str, int]:
    """Without brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"{text!r} is not host:port")
    if not 0 < int(port) <= 65535:
        raise ValueError(f"{text!r}: port {port} is not in [1, 65535]")
    if host.startswith("[") and host.endswith("]"):
        return _ip(host[1:-1], text), int(port)
    if ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, as [::1]:50061")
    if re.fullmatch(r"[0-9.]+", host):
        return _ip(host, text), int(port)
    return check_name(host, text), int(port)


def check_name(name: str, text: str) -> str:
    """A host's or pod's name. Raises ValueError about `text`."""
    labels = name.removesuffix(".").split(".")
    if len(name) > MAX_NAME_CHARS or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text!r}: {name!r} is no name of a host")
    return name


def _ip(host: str, text: str) -> str:
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        raise ValueError(f"{text!r}: {host!r} is no IP address") from None


def _dns_name(flag: str) -> DnsName:
    form = "dns:///name:port or dns://server:port/name:port"
    if not flag.startswith("dns://"):
        raise ValueError(f"{flag!r} is not {form}")
    authority, slash, target = flag.removeprefix("dns://").partition("/")
    if not slash or not target:
        raise ValueError(f"{flag!r} is not {form}")
    if target.startswith("_") and ":" not in target:
        name, port = check_name(target, flag), 0
    else:
        try:
            name, port = host_and_port(target)
            check_name(name, flag)
        except ValueError as error:
            raise ValueError(f"{flag!r}: {error}") from None
    return DnsName(flag, name, port, _server(authority, flag) if authority else None)


def _server(authority: str, flag: str) -> tuple[str, int]:
    """Its own name could be looked up nowhere."""
    has_port = authority.endswith("]") is False and ":" in authority
    try:
        host, port = host_and_port(authority if has_port else f"{authority}:{DNS_PORT}")
        return _ip(host, flag), port
    except ValueError:
        raise ValueError(
            f"{flag!r}: name server {authority!r} is no IP address, with or without a port"
        ) from None
