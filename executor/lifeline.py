"""Ends a process of the executor's as soon as the executor itself ends, however that is.

The process watches a descriptor whose other end the executor holds.
"""

import os
import select
import signal
import threading


def end_with_executor(descriptor: int, *, with_group: bool = False) -> None:
    """This process, as soon as the other end is closed, in the middle of whatever it does.

    `with_group`: it gets a process group of its own, and whatever it has started there ends, too.
    """
    if with_group:
        os.setpgrp()
    threading.Thread(target=_watch, args=(descriptor, with_group), name="lifeline", daemon=True).start()


def _watch(descriptor: int, with_group: bool) -> None:
    hang_up = select.poll()
    hang_up.register(descriptor, 0)
    hang_up.poll()
    if with_group:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
