"""Where texts are worked on: short ones in the pool, long ones one by one on a thread of their own."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from scheduler.errors import QueueFull

LONG = 16_384  # Characters or tokens from which on a text is long: some ten milliseconds of work.
MAX_LONG = 32 * 1024 * 1024  # Of all long texts that wait, together.
NICENESS = 5  # Not more: for moments the thread has the interpreter, for which the event loop then waits.

T = TypeVar("T")


class TextThreads:
    """Used from one event loop. No text holds the loop, or a shorter text, up for longer than a moment."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-texts", initializer=_yield_to_others)
        self._waiting = 0
        self._lock = threading.Lock()  # Of the number.

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, which must let go of the interpreter while it works natively.

        `size` is that of the text, in characters or tokens. Raises QueueFull while too much is waiting. Who
        is cancelled while it waits leaves nothing behind; a text that is worked on counts until that is done.
        """
        loop = asyncio.get_running_loop()
        if size < LONG:
            return await loop.run_in_executor(self._pool, work)
        if self._waiting and self._waiting + size > MAX_LONG:
            raise QueueFull("too many long texts are waiting already")
        held = [work]
        future = self._long.submit(lambda: held[0]())
        self._count(size)
        future.add_done_callback(lambda _: self._count(-size))
        try:
            return await asyncio.wrap_future(future)
        finally:
            held.clear()  # The thread comes to what was cancelled only later, and takes its text along.

    def close(self) -> None:
        """What is under way is not waited for."""
        self._long.shutdown(wait=False, cancel_futures=True)

    def _count(self, size: int) -> None:
        with self._lock:
            self._waiting += size


def _yield_to_others() -> None:
    """Linux has a priority for each thread; elsewhere it is one of the whole process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
