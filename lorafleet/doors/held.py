"""What callers hold at once of something that all share: bounded for each of them, and in all."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from lorafleet.doors.places import BEYOND, LEAST_S, MOST_OF_ONE, Line, Places


class Refusal(Protocol):
    """An error, or what makes one."""

    def __call__(self, message: str, *, retry_after_s: float) -> Exception: ...


class Held:
    """Amounts of one kind, used from one event loop. Who is refused is told when to come again (places.py):
    `key`, everywhere, is by what it is known then, "" for any of its caller's."""

    def __init__(
        self,
        what: str,
        most: float,
        refusal: Refusal,
        share: Callable[[str], float] = lambda caller: 0,
        *,
        first: float = 1.0,
        beyond: float = BEYOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most` in all, and `share(caller)` of one, where 0 is no limit. A caller with nothing there may
        have one of any size as its share, within `first` times what there may be in all, and who is alone one
        of any size at all. Who comes when it was told to is let in up to `beyond` times both. `what` is what
        there are too many of."""
        self._what, self._refusal, self._share = what, refusal, share
        self._most, self._first, self._beyond, self._clock = most, first, beyond, clock
        self._held = Counter[str]()  # By caller; no one of them is 0.
        self._total = 0
        self._all, self._own = Places(MOST_OF_ONE), Line()

    def __getitem__(self, caller: str) -> int:
        return self._held[caller]

    @property
    def total(self) -> int:
        return self._total

    @contextmanager
    def one(self, caller: str, key: str = "") -> Iterator[None]:
        """Raises what a refusal is."""
        self.take(caller, key=key)
        try:
            yield
        finally:
            self.give_back(caller)

    def take(self, caller: str, amount: int = 1, key: str = "") -> None:
        """To be given back. Raises what a refusal is."""
        if not self.enter(caller, amount, key):
            raise self.refused(caller, amount, key)

    def enter(self, caller: str, amount: int = 1, key: str = "") -> bool:
        """Whether it is taken, to be given back."""
        if not self.lets_in(caller, amount, key):
            return False
        now = self._clock()
        self._own.of(caller, now).taken(key, now, caller)
        self._all.taken(key, now, caller)
        self._held[caller] += amount
        self._total += amount
        return True

    def lets_in(self, caller: str, amount: int = 1, key: str = "") -> bool:
        return self._waits(caller, amount, key) == (None, None)

    def refused(self, caller: str, amount: int = 1, key: str = "", message: str = "") -> Exception:
        """What tells one that is not let in when to come again. `message` is what it says in place of which
        bound that is."""
        now, share = self._clock(), self._share(caller)
        own_s, all_s = self._waits(caller, amount, key)
        if own_s is not None:
            message = message or f"there are too many {self._what} of {caller}: at most {share} at once"
        wait_s = max(own_s or LEAST_S, all_s or LEAST_S)
        self._own.of(caller, now).keep(key, now, wait_s, caller)
        self._all.keep(key, now, wait_s, caller)
        return self._refusal(message or f"there are too many {self._what} now", retry_after_s=wait_s)

    def give_back(self, caller: str, amount: int = 1) -> None:
        now = self._clock()
        if amount:  # By what ends it is told how long places are held.
            self._own.ended(caller, self._held[caller], now, amount)
            self._all.ended(self._total, now, amount)
        self._held[caller] -= amount
        self._total -= amount
        if not self._held[caller]:
            del self._held[caller]

    def _waits(self, caller: str, amount: int, key: str) -> tuple[float | None, float | None]:
        """What it has to wait for, in its share and in all; None where there is room."""
        now, own, most = self._clock(), self._held[caller], self._most
        share, size, beyond = self._share(caller) or math.inf, float(amount), self._beyond
        own_s = self._own.of(caller, now).wait_s(own, share, now, key, caller, amount=size, beyond=beyond)
        most *= 1.0 if own else self._first
        return own_s, self._all.wait_s(self._total, most, now, key, caller, amount=size, beyond=beyond)
