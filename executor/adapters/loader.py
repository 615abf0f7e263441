"""Threads that read adapters, so that no step ever waits for a store. One load a digest at a time."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load(Generic[Result]):
    """`result`, or `error` when it is None; `seconds` spent on it."""

    digest: str
    result: Result | None
    error: Exception | None
    seconds: float


class Loader(Generic[Result]):
    """`start` and `finished` belong to one thread; `load` runs on the others, with `wake` after it.

    The threads are daemons: a store that hangs must not keep the process from ending.
    """

    def __init__(self, load: Callable[[str], Result], num_threads: int, wake: Callable[[], None]) -> None:
        self._load = load
        self._wake = wake
        self._todo: SimpleQueue[str | None] = SimpleQueue()
        self._done: SimpleQueue[Load[Result]] = SimpleQueue()
        self.in_flight: dict[str, float] = {}  # digest -> when it was started
        self._threads = [
            threading.Thread(target=self._run, name=f"adapter-loader-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_idle_thread(self) -> bool:
        """Whether a load that is started now begins at once."""
        return len(self.in_flight) < len(self._threads)

    def start(self, digest: str, now: float) -> None:
        if digest not in self.in_flight:
            self.in_flight[digest] = now
            self._todo.put(digest)

    def finished(self) -> list[Load[Result]]:
        """Outcomes since the last call; their digests may be started again."""
        outcomes = []
        while not self._done.empty():
            outcome = self._done.get()
            del self.in_flight[outcome.digest]
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """Threads end after the load they are in; what is queued behind is not read."""
        with suppress(Empty):  # a thread may take the last one meanwhile
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)

    def _run(self) -> None:
        while (digest := self._todo.get()) is not None:
            start = time.monotonic()
            result, failure = None, None
            try:
                result = self._load(digest)
            except Exception as error:
                failure = error
            self._done.put(Load(digest, result, failure, time.monotonic() - start))
            self._wake()
