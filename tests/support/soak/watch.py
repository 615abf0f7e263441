"""What a soaked fleet holds, again and again: of each process, of its metrics, of the spool and of Redis."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.support.services.cluster import Node
from tests.support.services.processes import children
from tests.support.soak.fleet import Fleet

MB = 1e6
# Of what is kept for as long as something lives, by service.
HELD = {
    "scheduler": ("live_requests", "queue_requests", "queue_groups", "known_names", "missing_pins"),
    "executor": (
        "running_sequences",
        "waiting_sequences",
        "slots_in_use",
        "loads_in_flight",
        "adapter_resident",
    ),
}
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """Seconds since the watch began, and values by what they are of, as "scheduler-0 threads"."""

    at_s: float
    values: dict[str, float]


class Watch:
    """Samples that are taken every `every_s`, until `stop` is set."""

    def __init__(self, fleet: Fleet, every_s: float) -> None:
        self._fleet, self._every_s, self._began = fleet, every_s, time.monotonic()
        self.samples: list[Sample] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            self.samples.append(self.look())
            self.stop.wait(self._every_s)

    def look(self) -> Sample:
        """Without what is away just now."""
        values: dict[str, float] = {}
        for node in self._fleet.nodes:
            with suppress(OSError):
                values |= _processes(node)
            with suppress(OSError):
                values |= _metrics(node)
        files, num_bytes = self._fleet.spooled()
        values |= {"spool files": files, "spool bytes": num_bytes}
        with suppress(redis.RedisError):
            values |= self._redis()
        return Sample(round(time.monotonic() - self._began, 1), values)

    def _redis(self) -> dict[str, float]:
        with self._fleet.redis.client(socket_timeout=1.0, socket_connect_timeout=1.0) as client:
            kinds = Counter(_kind(key.decode()) for key in client.scan_iter(count=1000))
            memory = client.info("memory")
            clients = client.info("clients")
        return {
            "redis memory_mb": memory["used_memory"] / MB,
            "redis clients": clients["connected_clients"],
            **{f"redis keys {kind}": count for kind, count in kinds.items()},
        }


def _processes(node: Node) -> dict[str, float]:
    """Of a service and its processes, which are told apart by how many it has; all of them together."""
    family = list(_family(node.process.pid))
    sums = Counter[str]()
    for pid in family:
        with suppress(OSError):  # It has ended.
            sums.update(_process(pid))
    return {f"{node.name} {what}": value for what, value in {**sums, "processes": len(family)}.items()}


def _family(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _family(child)


def _process(pid: int) -> dict[str, float]:
    proc = Path(f"/proc/{pid}")
    rollup = dict(line.split(":") for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    return {
        "rss_mb": int((proc / "statm").read_text().split()[1]) * PAGE_BYTES / MB,
        "pss_mb": int(rollup["Pss"].split()[0]) * 1024 / MB,
        "threads": len(list((proc / "task").iterdir())),
        "descriptors": len(list((proc / "fd").iterdir())),
    }


def _metrics(node: Node) -> dict[str, float]:
    metrics, prefix = node.metrics(), f"lorafleet_{node.module}_"
    held = {
        what: sum(value for name, value in metrics.items() if name.partition("{")[0] == prefix + what)
        for what in HELD[node.module]
    }
    return {f"{node.name} {what}": value for what, value in {**held, "series": len(metrics)}.items()}


def _kind(key: str) -> str:
    """The part of a key's name that says what it is of; a chunk's has none."""
    _, meta, rest = key.partition("{meta}:")
    return rest.partition(":")[0] if meta else "chunk"
