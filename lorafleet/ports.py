"""Finds free ports for services that start in a moment, and reserves them."""

import errno
import random
import socket
from contextlib import ExitStack

# Below those that systems give to outgoing connections (from 32768 on Linux, 49152 elsewhere): one of these
# may be somebody's before the service listens.
_FREE_PORTS = range(20000, 32768)
_ATTEMPTS = 1000


def free_port(reserved: ExitStack, host: str) -> int:
    """One on which nobody listens now, and which is found nowhere else on this machine until `reserved`
    closes: services may start on it, end and come back. Raises OSError."""
    for candidate in random.sample(_FREE_PORTS, _ATTEMPTS):
        # UDP's ports are not TCP's: this one keeps no service from listening.
        claim = reserved.enter_context(socket.socket(_family(host), socket.SOCK_DGRAM))
        try:
            claim.bind((host, candidate))
            with ExitStack() as probe:
                hold_port(probe, host, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            claim.close()
            continue
        return candidate
    tried = f"{_ATTEMPTS} ports of {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1}"
    raise OSError(errno.EADDRINUSE, f"none of {tried} is free")


def check_free(host: str, port: int) -> None:
    """Raises OSError when nothing can listen there now. To be asked before gRPC, which would log beside its
    error and does not tell the cause."""
    with ExitStack() as sockets:
        hold_port(sockets, host, port)


def hold_port(sockets: ExitStack, host: str, port: int) -> None:
    """Nobody else's until `sockets` closes. Raises OSError, and OverflowError above 65535."""
    probe = sockets.enter_context(socket.socket(_family(host)))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((host, port))
    probe.listen()  # without it, who comes next may bind the same one


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
