"""Processes that are killed at a step of their choice."""

import os
import signal
import sys
from collections.abc import Callable, Collection

from adapter_store import AdapterStoreError


def run_until_step(action: Callable[[], object], kill_at: int, steps: Collection[str]) -> int:
    """Runs `action` in a forked process that kills itself before its step number `kill_at`.

    Steps are calls of functions written in C with these names. Returns the number of steps done when it
    finished in time, -1 when it was killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        done = 0

        def count(frame: object, event: str, called: object) -> None:
            nonlocal done
            if event == "c_call" and getattr(called, "__name__", "") in steps:
                if done == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1

        sys.setprofile(count)
        try:
            action()
        except AdapterStoreError:
            os._exit(3)
        sys.setprofile(None)
        os.write(writer, str(done).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return int(output) if output else -1
