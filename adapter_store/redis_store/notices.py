"""Hears of changes at once. Watchers poll the counter anyway, so a notice may get lost without harm."""

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from adapter_store.errors import StoreUnavailable
from adapter_store.redis_store.primary import NotNow, Primary

_POLL_SECONDS = 0.5  # how long stop() may take
_PAUSE_SECONDS = 1.0  # between attempts to subscribe again
_log = logging.getLogger(__name__)


class Notices:
    """One thread with a connection of its own, which calls `hear` at every notice and after every gap."""

    def __init__(self, primary: Primary, channel: str, hear: Callable[[], None]) -> None:
        self._primary, self._channel, self._hear = primary, channel, hear
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-store-notices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._listen()
            except (NotNow, RedisError, OSError, StoreUnavailable) as error:
                _log.info("adapter store: notices are interrupted: %s", error)
                self._stopped.wait(_PAUSE_SECONDS)

    def _listen(self) -> None:
        with self._primary.subscribed(self._channel) as connection:
            self._hear()  # for what was said while nobody listened
            while not self._stopped.is_set():
                if connection.can_read(timeout=_POLL_SECONDS):
                    connection.read_response()
                    self._hear()
