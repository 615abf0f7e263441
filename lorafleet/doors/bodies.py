"""Large messages: nobody fills the memory with those that came, or holds the event loop up with them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

from lorafleet.doors.held import Held
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
        share = share or (lambda caller: max_bytes // 2)
        self._held = Held("bytes of large messages that are worked on", max_bytes, TooManyMessages, share)
        self._parsing = asyncio.Lock()

    def take(self, caller: str, num_bytes: int, key: str = "") -> None:
        """To be given back. Raises TooManyMessages."""
        self._held.take(caller, num_bytes, key)

    def give_back(self, caller: str, num_bytes: int) -> None:
        self._held.give_back(caller, num_bytes)

    @asynccontextmanager
    async def parsing(self) -> AsyncIterator[None]:
        """A turn for one message at a time: parsing holds the event loop up, which has to be there for
        all."""
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

    async def parsed(
        self, caller: str, raw: bytes, parse: Callable[[bytes], Message], key: str = ""
    ) -> Message:
        """`key` is by what the call is known when it comes again. Raises TooManyMessages, and what `parse`
        does."""
        if len(raw) < LARGE:
            return parse(raw)
        self._bodies.take(caller, len(raw), key)
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
