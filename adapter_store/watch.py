"""The news of a store since a number (schedulers ask for them), and a thread that polls for them."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from adapter_store.errors import StoreUnavailable

POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class News:
    """What changed after a number that was told before, up to `number`.

    `names` are the (tenant, name) pairs whose records changed, perhaps some more; None: any may have.
    """

    number: int
    names: frozenset[tuple[str, str]] | None


class Watcher:
    """One thread that calls `callback` whenever `read_counter` answers something new."""

    def __init__(self, read_counter: Callable[[], int], callback: Callable[[], None]) -> None:
        self._read_counter, self._callback = read_counter, callback
        self._seen = read_counter()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-store-watch", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A hint that now is a good moment to look."""
        self._wake.set()

    def stop(self) -> None:
        """Afterwards no further call starts; a running one is waited for, unless it calls this itself."""
        self._stopped.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                counter = self._read_counter()
                if counter != self._seen:
                    self._seen = counter
                    self._callback()
            except StoreUnavailable as error:  # it comes back, and the counter tells what happened meanwhile
                _log.warning("adapter store: a watcher cannot look: %s", error)
            except Exception:
                # A failing callback must not end the watch: the next change may matter more.
                _log.exception("adapter store: a watcher failed")


class Watchers:
    """Those of one store. Thread-safe."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._mutex = threading.Lock()  # guards it

    def add(self, read_counter: Callable[[], int], callback: Callable[[], None]) -> Callable[[], None]:
        """A watcher; what is returned stops it."""
        watcher = Watcher(read_counter, callback)
        with self._mutex:
            self._watchers.add(watcher)

        def stop() -> None:
            with self._mutex:
                self._watchers.discard(watcher)
            watcher.stop()

        return stop

    def wake(self) -> None:
        """All of them."""
        with self._mutex:
            watchers = [*self._watchers]
        for watcher in watchers:
            watcher.wake()
