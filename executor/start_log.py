"""The log of a start: which part of it lasts, and how far it is."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EVERY_S = 10.0


class StartPart:
    """A part of a start, while it lasts. `advance` may be called on any thread."""

    def __init__(self, what: str, total: int, named: tuple[str, ...]) -> None:
        self._what = what
        self._total = total
        self._left = list(named)
        self._done = 0
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def advance(self, name: str = "") -> None:
        """One more is done: this one, if they have names."""
        with self._lock:
            self._done += 1
            if name in self._left:
                self._left.remove(name)

    def tell_begin(self) -> None:
        logger.info("start: %s%s", self._what, f" ({self._total})" if self._total else "")

    def tell_progress(self) -> None:
        with self._lock:
            of_all = f" of {self._total}" if self._total else ""
            far = f", {self._done}{of_all} done" if self._done or of_all else ""
            left = f", not yet: {', '.join(self._left)}" if self._left else ""
        logger.info("start: %s lasts for %.0f s%s%s", self._what, self._seconds, far, left)

    def tell_end(self) -> None:
        logger.info("start: %s took %.1f s", self._what, self._seconds)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


@contextmanager
def start_part(
    what: str, total: int = 0, named: tuple[str, ...] = (), every_s: float | None = None
) -> Iterator[StartPart]:
    """Tells the log that `what` begins, every so many seconds (EVERY_S) how far it is, and how long it took.

    total: how many calls of `advance` will come; 0 where that is not known. named: all their names, where
    they have some: the log tells those that are left.
    """
    part, over = StartPart(what, total, named), threading.Event()

    def tell() -> None:
        while not over.wait(every_s or EVERY_S):
            part.tell_progress()

    part.tell_begin()
    teller = threading.Thread(target=tell, name="start-log", daemon=True)
    teller.start()
    try:
        yield part
    finally:
        over.set()
        teller.join()
    part.tell_end()
