"""A file that is read again when it changes; when it cannot be, what was read last goes on to count."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class InvalidAuthFile(Exception):
    """The file cannot be used; the text names it, the entry and the key."""


class WatchedFile(Generic[T]):
    """What `load` makes of a file. Raises InvalidAuthFile when made, and never again."""

    def __init__(self, path: Path, load: Callable[[Path], T]) -> None:
        self._path = path
        self._load = load
        self._stamp = _stamp(path)
        self._content = load(path)

    def read(self) -> T:
        """The same object until the file changes. A file that became unreadable is logged once."""
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._content = self._load(self._path)
                logger.info("read %s again", self._path)
            except InvalidAuthFile as error:
                logger.error("keeping what was read before: %s", error)
        return self._content


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does, also when another one is renamed over it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
