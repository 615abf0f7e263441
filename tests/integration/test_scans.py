"""Strangers who speak no TLS to a port with TLS fill no log, unless an operator asks for it."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from adapter_store import open_store
from lorafleet.ports import free_port
from tests.support.services.certificates import make_certificates
from tests.support.services.cluster import ROOT, Cluster, wait_until

FIRST_BYTES = (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x05hello")
TIMES = 10
OF_GRPC = re.compile(r"^[IWEF]\d{4} ", re.MULTILINE)  # "I1231 23:59:59.000000 ...", in place of our own form.


def scan(port: int) -> None:
    """Each is answered, or cut off, before the next one."""
    for first in FIRST_BYTES * TIMES:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(first)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                """What a server says before it hangs up."""


@pytest.mark.parametrize(
    ("module", "verbosity", "lines"),
    [("scheduler", "", 0), ("executor", "", 0), ("scheduler", "INFO", len(FIRST_BYTES) * TIMES)],
)
def test_a_scan_leaves_no_line(
    cluster: Cluster, tmp_path: Path, module: str, verbosity: str, lines: int
) -> None:
    """Without lorafleet.child, as containers start a service: it imports gRPC first."""
    made = make_certificates(tmp_path / "certificates")
    open_store(str(tmp_path / "store"))
    with ExitStack() as stack:
        port, metrics = (free_port(stack, "127.0.0.1") for _ in range(2))
        log = stack.enter_context((tmp_path / "log").open("w+b"))
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    module,
                    "--model",
                    str(cluster.model),
                    "--store",
                    str(tmp_path / "store"),
                ),
                *(
                    "--listen",
                    f"127.0.0.1:{port}",
                    "--metrics-port",
                    str(metrics),
                    *made.flags("good", ca="ca"),
                ),
                *(("--executor", "127.0.0.1:1") if module == "scheduler" else ()),
            ],
            cwd=ROOT,
            env=_environment(verbosity),
            stderr=log,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_until(lambda: b"listening on" in (tmp_path / "log").read_bytes(), "the service listens")
        scan(port)
        wait_until(lambda: handshakes(tmp_path / "log") == lines, "all lines come, where some do")
        assert lines or not OF_GRPC.search((tmp_path / "log").read_text())


def handshakes(log: Path) -> int:
    return log.read_text().lower().count("handshake failed")


def _environment(verbosity: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "LORAFLEET_"))}
    return {**kept, "GRPC_VERBOSITY": verbosity} if verbosity else kept
