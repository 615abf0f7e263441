"""Ports for services that start in a moment."""

import errno
import random
import socket
from contextlib import ExitStack

# Below those that systems give to outgoing connections (from 32768 on Linux, 49152 elsewhere): one of these
# may be somebody's before the service listens.
_FREE_PORTS = range(20000, 32768)
_ATTEMPTS = 1000


def hold_port(sockets: ExitStack, host: str, port: int) -> int:
    """`port`, or for 0 a free one: nobody else's until `sockets` closes.

    Raises OSError, and OverflowError above 65535.
    """
    for candidate in [port] if port else random.sample(_FREE_PORTS, _ATTEMPTS):
        probe = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, candidate))
            probe.listen()  # without it, who comes next may bind the same one
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE:
                raise
            probe.close()
            continue
        return candidate
    tried = f"{_ATTEMPTS} ports of {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1}"
    raise OSError(errno.EADDRINUSE, f"none of {tried} is free")
