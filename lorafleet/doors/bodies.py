"""Large messages: nobody fills the memory with those that came, or holds the event loop up with them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

from lorafleet.doors.refusals import TooManyMessages

Message = TypeVar("Message")

LARGE = 64 * 1024
"""Bytes. Of smaller ones, how many there are is bounded by what works on them."""
REST = 3.0
"""After one was parsed, others wait for so many times as long as that took: 55 ms for 11 MiB of token ids."""


class Bodies:
    """`max_bytes` in all, and `share(caller)` of one caller (0 is all), or half. Who has none there may
    have one of any size, while it has room in all: parsed, a message may have several times its bytes."""

    def __init__(self, max_bytes: int, share: Callable[[str], int] | None = None) -> None:
        self._max = max_bytes
        self._share = share or (lambda caller: max_bytes // 2)
        self._held = Counter[str]()  # By caller; no one of them is 0.
        self._parsing = asyncio.Lock()

    def take(self, caller: str, num_bytes: int) -> None:
        """To be given back. Raises TooManyMessages."""
        held, own = self._held.total(), self._held[caller]
        share = self._share(caller) or self._max
        if (held and held + num_bytes > self._max) or (own and own + num_bytes > share):
            raise TooManyMessages("the large messages that are worked on leave no room for this one")
        self._held[caller] += num_bytes

    def give_back(self, caller: str, num_bytes: int) -> None:
        self._held[caller] -= num_bytes
        if not self._held[caller]:
            del self._held[caller]

    @asynccontextmanager
    async def parsing(self) -> AsyncIterator[None]:
        """For one message at a time: parsing holds the event loop up, which has to be there for all."""
        await self._parsing.acquire()
        began = time.perf_counter()
        try:
            yield
        finally:
            rest = REST * (time.perf_counter() - began)
            asyncio.get_running_loop().call_later(rest, self._parsing.release)


class Body:
    """That of one call."""

    __slots__ = ("_bodies", "_caller", "_num_bytes")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._caller, self._num_bytes = "", 0
        _BODY.set(self)

    async def parsed(self, caller: str, raw: bytes, parse: Callable[[bytes], Message]) -> Message:
        """Raises TooManyMessages, and what `parse` does."""
        if len(raw) < LARGE:
            return parse(raw)
        self._bodies.take(caller, len(raw))
        self._caller, self._num_bytes = caller, len(raw)
        async with self._bodies.parsing():
            return parse(raw)

    def is_done(self) -> None:
        """May be said twice."""
        if self._num_bytes:
            self._bodies.give_back(self._caller, self._num_bytes)
            self._num_bytes = 0


# Of the call that the running task serves.
_BODY: ContextVar[Body | None] = ContextVar("body", default=None)


def message_is_done() -> None:
    """The running call, which goes on, has nothing of its message any more."""
    if body := _BODY.get():
        body.is_done()
