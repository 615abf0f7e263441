"""Certificates for a measurement over TLS, of one CA, in a folder that goes with it."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lorafleet.tls.files import Tls
from scheduler.bench.streaming.servers import HOST

_DAYS = 1.0


@dataclass(frozen=True, slots=True)
class Locks:
    """TLS towards the client, mutual TLS towards executors."""

    client: Tls
    executor: Tls
    scheduler_flags: tuple[str, ...]


@contextlib.contextmanager
def locks() -> Iterator[Locks]:
    """Needs `cryptography`."""
    from lorafleet.tls.authority import Authority

    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as name:
        folder = Path(name)
        authority = Authority.make(folder, "ca", "LoraFleet bench", _DAYS)
        server = authority.issue("server", [HOST], server=True, days=_DAYS)
        shown = authority.issue("scheduler", ["scheduler"], server=False, days=_DAYS)
        ca, key, shown_key = folder / "ca.crt", server.with_suffix(".key"), shown.with_suffix(".key")
        flags = {
            "--tls-cert-file": server,
            "--tls-key-file": key,
            "--executor-ca-file": ca,
            "--executor-cert-file": shown,
            "--executor-key-file": shown_key,
        }
        words = tuple(str(word) for pair in flags.items() for word in pair)
        yield Locks(Tls(ca=ca), Tls(ca=ca, cert=server, key=key), words)
