"""The queue of events on their way to one scheduler. The engine never waits for it."""

import asyncio
from collections import deque

from lorafleet.v1.executor_pb2 import ExecutorEvent


class Outbox:
    """A queue within one event loop that is full from `capacity` events on.

    What comes while it is full is kept all the same, since no token may be lost; the time that it may stay
    full bounds it instead: see `overdue`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[ExecutorEvent] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._full_since: float | None = None

    def __len__(self) -> int:
        return len(self._events)

    @property
    def full(self) -> bool:
        return len(self._events) >= self._capacity

    def put(self, event: ExecutorEvent) -> None:
        """Nothing happens once it is closed."""
        if not self._closed:
            self._events.append(event)
            self._changed.set()

    def overdue(self, now: float, timeout_s: float) -> bool:
        """Whether it has been full at each call for `timeout_s`; call it regularly."""
        if not self.full:
            self._full_since = None
            return False
        if self._full_since is None:
            self._full_since = now
        return now - self._full_since >= timeout_s

    def close(self) -> None:
        """`get` still returns what is in it."""
        self._closed = True
        self._changed.set()

    def discard(self) -> None:
        """Close it and forget what is in it."""
        self._events.clear()
        self.close()

    async def get(self) -> ExecutorEvent | None:
        """The next event; None when it is closed and empty."""
        while not self._events and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft() if self._events else None
