"""How many messages are read at once: nobody fills the memory with those on their way."""

import asyncio
from collections import Counter, deque

from lorafleet.doors.held import Held
from lorafleet.doors.places import LEAST_S
from lorafleet.doors.refusals import TooManyMessages

GRACE_S = 0.01
_TOO_MANY_WAIT = "too many calls wait until their messages can be read"
LOOKS = 4  # At a line that does not move, before those in it are refused.


class Turns:
    """At most `at_once` in all and half of them of one caller; others wait for a turn, the longest first.

    A small message has come whole when its call is accepted, so only large and slow ones keep a turn. How
    large one is shows when it has been read, so each counts as the largest. Of one caller, so that somebody
    who sends slowly leaves turns for all others.
    """

    def __init__(self, at_once: int, max_waiting: int = 4096, wait_s: float = 2.0) -> None:
        """Who waits is refused when no one of the same caller has had a turn for `wait_s`. Of `max_waiting`
        half at most are of one caller."""
        share = max(1, at_once // 2)
        self._taken = Held("messages on their way", at_once, TooManyMessages, lambda caller: share)
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._line: dict[str, deque[asyncio.Future[None]]] = {}  # By caller; no one of them is empty.
        self._moved = Counter[str]()  # Turns that came to those in each line.
        self.num_waiting = 0

    async def take(self, caller: str, key: str = "") -> None:
        """To be given back. Raises TooManyMessages when nobody gets one any more, or too many wait; `key` is
        by what it is known when it comes again."""
        if not self._taken.enter(caller, key=key):
            await self._wait(caller, key)

    def give_back(self, caller: str) -> None:
        self._taken.give_back(caller)
        for waiting in list(self._line):
            if not self._taken.lets_in(waiting):
                continue
            line = self._line.pop(waiting)
            turn = line.popleft()
            if line:
                self._line[waiting] = line  # Behind all others now.
            self._taken.enter(waiting)
            self._moved[waiting] += 1
            turn.set_result(None)
            return

    async def _wait(self, caller: str, key: str) -> None:
        own = len(self._line.get(caller, ()))
        if self.num_waiting >= self._max_waiting or own >= max(1, self._max_waiting // 2):
            raise self._taken.refused(caller, key=key, message=_TOO_MANY_WAIT)
        turn = asyncio.get_running_loop().create_future()
        self._line.setdefault(caller, deque()).append(turn)
        self.num_waiting += 1
        try:
            await self._come(caller, turn, key)
        except BaseException:
            if turn.done():
                self.give_back(caller)  # It came at that very moment.
            raise
        finally:
            self.num_waiting -= 1
            self._leave(caller, turn)

    async def _come(self, caller: str, turn: asyncio.Future[None], key: str) -> None:
        """Looks are counted, not time: while this process itself does not run, no line can move."""
        looks, seen = 0, self._moved[caller]
        while not turn.done():
            await asyncio.wait([turn], timeout=self._wait_s / LOOKS)
            looks, seen = looks + 1 if self._moved[caller] == seen else 0, self._moved[caller]
            if looks > LOOKS and not turn.done():
                if self._taken.enter(caller, key=key):  # Who waited was told to come, and is due by now.
                    return
                why = f"too many large or slow messages are sent: none came to its end for {self._wait_s:g} s"
                raise self._taken.refused(caller, key=key, message=why)

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        """Out of the line, where it still stands in one."""
        line = self._line.get(caller)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._line[caller]
        if caller not in self._line:
            self._moved.pop(caller, None)


class ShortTurns:
    """At most `at_once`: when others wait, the one that began first gives way at the second look at it.

    For messages that are small, and come whole with their calls, from anyone: who sends large or slow ones
    keeps nobody else out. Callers who wait come in turn, and of one the newest call first: those before it
    have given no sign of a message, and their clients may have gone.
    """

    def __init__(self, at_once: int, max_waiting: int = 256) -> None:
        """When more wait, the oldest one of the caller with the most of them is refused."""
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._reading: dict[asyncio.Timeout, None] = {}  # The first first.
        self._line: dict[str, list[tuple[asyncio.Timeout, asyncio.Future[None]]]] = {}  # The newest last.
        self._looking: asyncio.TimerHandle | None = None
        self._seen: asyncio.Timeout | None = None  # The first one, at the last look.
        self.num_waiting = 0

    async def begin(self, caller: str, reading: asyncio.Timeout) -> None:
        """`reading` times out when it has to give way. To be ended, whatever comes of it. Raises
        TooManyMessages."""
        turn = asyncio.get_running_loop().create_future()
        self._line.setdefault(caller, []).append((reading, turn))
        self.num_waiting += 1
        try:
            if self.num_waiting > self._max_waiting:
                self._refuse_one()
            self._go_on()
            await turn
        finally:
            self.num_waiting -= 1
            self._leave(caller, reading, turn)

    def end(self, reading: asyncio.Timeout) -> None:
        self._reading.pop(reading, None)
        self._go_on()

    def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        while self._line and len(self._reading) < self._at_once:
            caller = next(iter(self._line))
            line = self._line.pop(caller)
            reading, turn = line.pop()
            if line:
                self._line[caller] = line  # Behind all others now.
            if not turn.done():
                self._reading[reading] = None
                turn.set_result(None)
        if self._line and self._looking is None:
            self._looking = loop.call_later(GRACE_S, self._look)

    def _look(self) -> None:
        """Looks are counted, not time: a loop that comes late has messages to read first."""
        self._looking = None
        first = next(iter(self._reading), None)
        if first is not None and first is self._seen and self._line:
            del self._reading[first]
            first.reschedule(0)
        self._seen = next(iter(self._reading), None)
        self._go_on()

    def _refuse_one(self) -> None:
        caller, line = max(self._line.items(), key=lambda each: len(each[1]))
        _, turn = line.pop(0)
        if not line:
            del self._line[caller]
        if not turn.done():
            # It is the newest of its caller's when it comes again, and first once all others had a turn.
            retry_after_s = max(LEAST_S, 2 * GRACE_S * len(self._line))
            turn.set_exception(TooManyMessages(_TOO_MANY_WAIT, retry_after_s=retry_after_s))

    def _leave(self, caller: str, reading: asyncio.Timeout, turn: asyncio.Future[None]) -> None:
        """Out of the line, where it still stands in one."""
        line = self._line.get(caller, [])
        if (reading, turn) in line:
            line.remove((reading, turn))
            if not line:
                del self._line[caller]
