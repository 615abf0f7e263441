"""What was done to a fleet on purpose, and when: an error that none of it explains is not injected."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from lorafleet import LoraFleetError


class Cause(Enum):
    """Each with the errors that it may bring, and for how many seconds after it is over."""

    STORE_AWAY = "the store is away", ("UNAVAILABLE STORE_UNAVAILABLE",), 3.0
    SCHEDULER_AWAY = (
        "a scheduler restarts, and its calls that no client takes up again end",
        ("UNAVAILABLE DRAINING", "UNAVAILABLE", "CANCELLED"),
        1.0,
    )
    WITHDRAWN = "a version is withdrawn", ("NOT_FOUND ADAPTER_NOT_FOUND",), float("inf")
    REMOVED = (
        "a version is removed at once, with what it runs",
        ("FAILED_PRECONDITION ADAPTER_REMOVED",),
        float("inf"),
    )
    EXECUTOR_AWAY = "an executor that a version should leave is away", ("DEADLINE_EXCEEDED",), 5.0

    def __init__(self, text: str, errors: tuple[str, ...], lasts_s: float) -> None:
        self.text, self.errors, self.lasts_s = text, errors, lasts_s


@dataclass
class Deed:
    """`about`: the digest or service that it was done to; `ended` is infinity while it goes on."""

    cause: Cause
    about: str
    began: float
    ended: float = float("inf")


@dataclass
class Causes:
    """What was done, and the errors by what they come from. Safe to use from several threads.

    expected      errors that their own request asks for, as that of a wrong token: by what was asked
    injected      errors that a deed explains: by its cause
    not_injected  all others, in words
    """

    expected: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    not_injected: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    _deeds: list[Deed] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def lasting(self, cause: Cause, about: str = "") -> Iterator[None]:
        """While the block runs, and a moment longer."""
        deed = Deed(cause, about, time.monotonic())
        with self._lock:
            self._deeds.append(deed)
        try:
            yield
        finally:
            deed.ended = time.monotonic()

    def from_now_on(self, cause: Cause, about: str) -> None:
        with self._lock:
            self._deeds.append(Deed(cause, about, time.monotonic(), time.monotonic()))

    def did(self, what: str) -> None:
        with self._lock:
            self.done[what] += 1

    def expect(self, what: str) -> None:
        with self._lock:
            self.expected[what] += 1

    def judge(self, error: LoraFleetError, asked_at: float, about: str, may_be: tuple[Cause, ...]) -> None:
        """about: what was asked for; `may_be`: causes that a call of its kind may feel at all."""
        now, named = time.monotonic(), name_of(error)
        with self._lock:
            for deed in self._deeds:
                cause = deed.cause
                lasted = deed.began <= now and asked_at <= deed.ended + cause.lasts_s
                if cause in may_be and named in cause.errors and lasted and deed.about in about:
                    self.injected[f"{cause.text}: {named}"] += 1
                    return
            self.not_injected.append(f"{about or 'the base'} after {now - asked_at:.2f} s: {named}: {error}")


def name_of(error: LoraFleetError) -> str:
    return f"{error.code.name} {error.reason}".strip()
