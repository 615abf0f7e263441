"""Where texts are worked on: short ones in the pool, long ones one by one, on a thread of their own.

Tenants have it by turns, so that one with many long texts does not hold up all others' with its last.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lorafleet.doors.held import Held
from scheduler.errors import QueueFull

LONG = 16_384  # Characters or tokens from which on a text is long: some ten milliseconds of work.
MAX_LONG = 32 * 1024 * 1024  # Of all long texts that wait, together; twice that with first ones of tenants.
NICENESS = 5  # Not more: for moments the thread has the interpreter, for which the event loop then waits.

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Text:
    """One that waits. Its work is dropped at once when nobody waits for it any more."""

    work: Callable[[], Any] | None
    result: Future[Any] = field(default_factory=Future)


class TextThreads:
    """Used from one event loop. No text holds the loop, or a shorter text, up for longer than a moment."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-texts", initializer=_yield_to_others)
        self._lock = threading.Lock()  # Of what follows.
        # The size of all, those that are worked on among them.
        self._waiting = Held("long texts that wait", MAX_LONG, QueueFull, first=2.0)
        self._lines: dict[str, deque[_Text]] = {}  # By tenant, none empty: whose turn it is comes first.

    async def run(self, size: int, work: Callable[[], T], tenant: str = "", key: str = "") -> T:
        """What `work` returns, which must let go of the interpreter while it works natively.

        `size` is that of the text, in characters or tokens; `key` is its request's. Raises QueueFull while
        too much is waiting, which is twice as much for a tenant without another text there. Who is cancelled
        while it waits leaves nothing behind; a text that is worked on counts until that is done.
        """
        loop = asyncio.get_running_loop()
        if size < LONG:
            return await loop.run_in_executor(self._pool, work)
        text = _Text(work)
        self._enter(text, tenant, size, key)
        text.result.add_done_callback(lambda _: self._leave(tenant, size))
        self._long.submit(self._work_on_next)
        try:
            answer: T = await asyncio.wrap_future(text.result)
            return answer
        finally:
            text.work = None  # The thread comes to what was cancelled only later.

    def close(self) -> None:
        """What is under way is not waited for, and what waits is cancelled."""
        self._long.shutdown(wait=False, cancel_futures=True)
        while text := self._next():
            text.result.cancel()

    def _enter(self, text: _Text, tenant: str, size: int, key: str) -> None:
        with self._lock:
            self._waiting.take(tenant, size, key)
            self._lines.setdefault(tenant, deque()).append(text)

    def _leave(self, tenant: str, size: int) -> None:
        with self._lock:
            self._waiting.give_back(tenant, size)

    def _next(self) -> _Text | None:
        """The first one of the tenant whose turn it is, which is the last to have the next one."""
        with self._lock:
            while self._lines:
                tenant = next(iter(self._lines))
                line = self._lines.pop(tenant)
                while line:
                    text = line.popleft()
                    if text.result.cancelled():
                        continue
                    if line:
                        self._lines[tenant] = line
                    return text
            return None

    def _work_on_next(self) -> None:
        """On the thread, once for each text, though not for that one."""
        while text := self._next():
            work = text.work
            if work is not None and text.result.set_running_or_notify_cancel():
                try:
                    text.result.set_result(work())
                except BaseException as error:
                    text.result.set_exception(error)
                return


def _yield_to_others() -> None:
    """Linux has a priority for each thread; elsewhere it is one of the whole process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
