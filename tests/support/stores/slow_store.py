"""A Redis store whose readers share a slow network: `python -m tests.support.stores.slow_store FOLDER`.

What stands at --port is fast, to fill it; the same store at --slow-port sends --megabytes-per-s to all its
readers together, as a disk or a network of that speed would. It runs until it is interrupted, and keeps
nothing: `lorafleet bench preset slow-store` is measured with it.
"""

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

from tests.support.services.proxy import Proxy
from tests.support.stores.redis_server import RedisServer


class Throttle:
    """How long the next piece has to wait, so that all together go at this rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, size: int) -> float:
        now = time.monotonic()
        with self._lock:
            self._free_at = max(self._free_at, now) + size / self._bytes_per_s
            return self._free_at - now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for its log")
    parser.add_argument("--port", type=int, default=6390)
    parser.add_argument("--slow-port", type=int, default=6391)
    parser.add_argument("--megabytes-per-s", type=float, default=50.0)
    args = parser.parse_args()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before there are threads that could take them
    throttle = Throttle(args.megabytes_per_s * 1e6)
    with (
        RedisServer(args.folder, "--appendonly", "no", port=args.port) as server,
        Proxy(server.port, throttle, listen=args.slow_port) as slow,
    ):
        for speed, port in (("fast", server.port), ("slow", slow.port)):
            sys.stdout.write(f"{speed} redis://127.0.0.1:{port}?allow_volatile=1\n")
        sys.stdout.flush()
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
