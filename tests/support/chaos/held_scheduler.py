"""A scheduler that keeps the interpreter's lock in a native call, for HOLD_S seconds at each SIGUSR1.

What the product never does itself, a library may: neither its event loop nor any of its threads runs then,
while gRPC goes on to take calls and to answer pings.
"""

import ctypes
import os
import signal
import sys

from scheduler.__main__ import main

SLEEP = ctypes.PyDLL(None).usleep  # Unlike those of a CDLL, calls of a PyDLL keep the lock.


def hold(*_: object) -> None:
    for _ in range(round(float(os.environ["HOLD_S"]) * 2)):
        SLEEP(500_000)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, hold)
    sys.exit(main())
