"""How long listing takes, and how much memory the client needs for it, through a real scheduler."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

_CLIENT = """
import sys, time
from lorafleet import Client
with Client(sys.argv[1]) as client:
    client.adapters.aliases("nobody")  # connected
    start = time.perf_counter()
    count = sum(1 for _ in client.adapters.summaries())
    seconds = time.perf_counter() - start
# Not ru_maxrss: that would count what the process was before it was this program.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count, seconds, int(peak) * 1024)
"""


@contextlib.contextmanager
def scheduler(model: Path, store: str) -> Iterator[str]:
    """The address of one without executors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--model", str(model), "--store", store, "--listen", address, "--metrics-port", "-1"]
    command = [sys.executable, "-m", "scheduler", *flags, "--executor", "127.0.0.1:1", "--log-level", "error"]
    process = subprocess.Popen(command)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=120)
        yield address
    finally:
        process.terminate()
        process.wait()


def measure(model: Path, store: str, count: int, rounds: int) -> dict[str, Any]:
    """Seconds of the first listing of a scheduler's life and of later ones, by the client's generator and by
    the whole command; bytes of memory of the client's process at its largest."""
    with scheduler(model, store) as address:
        first, *later = [_client(address, count) for _ in range(rounds + 1)]
        command = [_command(address) for _ in range(rounds)]
    return {
        "first_s": first[0],
        "later_s": sorted(seconds for seconds, _ in later),
        "command_s": sorted(command),
        "client_peak_bytes": max(peak for _, peak in (first, *later)),
    }


def _client(address: str, expected: int) -> tuple[float, int]:
    """Seconds and peak memory."""
    done = subprocess.run([sys.executable, "-c", _CLIENT, address], capture_output=True, check=True)
    count, seconds, peak = done.stdout.split()
    if int(count) != expected:
        raise RuntimeError(f"{int(count)} of {expected} adapters were listed")
    return float(seconds), int(peak)


def _command(address: str) -> float:
    command = [sys.executable, "-m", "lorafleet", "adapters", "list", "--target", address]
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start
