"""How long listing takes, and how much memory the client needs for it, through a real scheduler."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from lorafleet.ports import free_port

_CLIENT = """
import sys, time
from lorafleet import Client
with Client(sys.argv[1]) as client:
    client.adapters.aliases("nobody")  # connected
    start, busy = time.perf_counter(), time.process_time()
    count = sum(1 for _ in client.adapters.summaries())
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
# Not ru_maxrss: that would count what the process was before it was this program.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count, seconds, busy, int(peak) * 1024)
"""


@contextlib.contextmanager
def scheduler(model: Path, store: str) -> Iterator[tuple[str, int]]:
    """Address and process id of one without executors."""
    with contextlib.ExitStack() as reserved:
        address = f"127.0.0.1:{free_port(reserved, '127.0.0.1')}"
        flags = ["--model", str(model), "--store", store, "--listen", address, "--metrics-port", "-1"]
        unserved = ["--executor", "127.0.0.1:1", "--log-level", "error"]
        process = subprocess.Popen([sys.executable, "-m", "scheduler", *flags, *unserved])
        try:
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(timeout=120)
            yield address, process.pid
        finally:
            process.terminate()
            process.wait()


def measure(model: Path, store: str, count: int, rounds: int) -> dict[str, Any]:
    """Seconds of the first listing of a scheduler's life and of later ones, by the client's generator and by
    the whole command; of the later ones also the seconds that client and scheduler had a core, which does not
    depend on what else the machine does; bytes of memory of the client's process at its largest."""
    with scheduler(model, store) as (address, pid):
        first = _client(address, count)
        before = _busy(pid)
        later = [_client(address, count) for _ in range(rounds)]
        busy = (_busy(pid) - before) / rounds
        command = [_command(address) for _ in range(rounds)]
    return {
        "first_s": first.seconds,
        "later_s": sorted(listing.seconds for listing in later),
        "client_busy_s": sum(listing.busy for listing in later) / rounds,
        "scheduler_busy_s": busy,
        "command_s": sorted(command),
        "client_peak_bytes": max(listing.peak_bytes for listing in (first, *later)),
    }


def _busy(pid: int) -> float:
    """Seconds of cores that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Listing:
    seconds: float
    busy: float
    peak_bytes: int


def _client(address: str, expected: int) -> _Listing:
    done = subprocess.run([sys.executable, "-c", _CLIENT, address], capture_output=True, check=True)
    count, seconds, busy, peak = done.stdout.split()
    if int(count) != expected:
        raise RuntimeError(f"{int(count)} of {expected} adapters were listed")
    return _Listing(float(seconds), float(busy), int(peak))


def _command(address: str) -> float:
    command = [sys.executable, "-m", "lorafleet", "adapters", "list", "--target", address]
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start
