"""A file that is read again when it changes; when it cannot be, what was read last goes on to count."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lorafleet.tls.files import stamp

T = TypeVar("T")

logger = logging.getLogger(__name__)


class InvalidFile(Exception):
    """The file cannot be used; the text names it, the entry and the key."""


class WatchedFile(Generic[T]):
    """What `load` makes of a file. Raises InvalidFile when made, and never again.

    `load` raises InvalidFile; what else a library raises for some content, as RecursionError for what is
    nested too deeply, is taken for one.
    """

    def __init__(self, path: Path, load: Callable[[Path], T]) -> None:
        self._path = path
        self._load = load
        self._stamp = stamp(path)
        self._content = self._loaded()

    def read(self) -> T:
        """The same object until the file changes. A file that became unreadable is logged once."""
        newest = stamp(self._path)
        if newest != self._stamp:
            self._stamp = newest
            try:
                self._content = self._loaded()
                logger.info("read %s again", self._path)
            except InvalidFile as error:
                logger.error("keeping what was read before: %s", error)
        return self._content

    def _loaded(self) -> T:
        try:
            return self._load(self._path)
        except InvalidFile:
            raise
        except Exception as error:  # Its text may hold what the file does.
            raise InvalidFile(f"{self._path}: cannot be used ({type(error).__name__})") from error
