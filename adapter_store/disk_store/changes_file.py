"""How many changes a store in a folder has seen, and which names the last of them were about.

One small text file, sealed, replaced whole: the number, then a line "<number> <tenant>/<name>" for each of
the last changes. The number is odd while a change is under way. It stays so when the process that makes the
change dies; then it is not known whether the change happened, and whoever comes next counts it as one.
"""

import logging
import time
from pathlib import Path

from adapter_store.errors import DataLoss
from adapter_store.files.durable import replace_file
from adapter_store.files.seal import seal, unseal
from adapter_store.record import News

_REMEMBERED = 256
_KEY = "changes"
_log = logging.getLogger(__name__)


class ChangesFile:
    """The caller holds the store's lock where it says so. Any method may raise OSError."""

    def __init__(self, path: Path, aside: Path) -> None:
        self._path, self._aside = path, aside

    def number(self) -> int:
        """Half of what the file says: it moves once a change, when that is done."""
        return self._read()[0] // 2

    @property
    def is_unsettled(self) -> bool:
        """Whether a change is under way, or was when its process died."""
        return bool(self._read()[0] % 2)

    def news(self, since: int) -> News:
        """The news of the changes that are done: one that is under way has not been acknowledged."""
        number, recent = self._read()
        number -= number % 2
        recent = [entry for entry in recent if entry[0] <= number]
        if since * 2 == number:
            return News(since, frozenset())
        oldest = recent[0][0] if recent else number
        if since < 0 or not oldest <= since * 2 + 2 <= number:
            return News(number // 2, None)
        return News(number // 2, frozenset(name for at, name in recent if at > since * 2))

    def settle(self) -> None:
        """Under the lock: a change that is under way now is one whose process died."""
        number, recent = self._read()
        if number % 2:
            self._write(number + 1, recent)

    def begin(self, tenant: str, name: str) -> None:
        """Under the lock, before the record is written."""
        self.settle()
        number, recent = self._read()
        self._write(number + 1, [*recent, (number + 2, (tenant, name))][-_REMEMBERED:])

    def _read(self) -> tuple[int, list[tuple[int, tuple[str, str]]]]:
        try:
            first, *lines = unseal(_KEY, self._path.read_bytes()).splitlines()
        except FileNotFoundError:
            self._aside.stat()  # or the whole store is away, which says nothing
            return 0, []
        except DataLoss as error:  # it goes on from the clock: nobody takes that for a number he has seen
            _log.error("adapter store: %s", error)
            return time.time_ns() // 1000 * 2, []
        recent = []
        for line in lines:
            at, _, path = line.partition(" ")
            tenant, _, name = path.partition("/")
            recent.append((int(at), (tenant, name)))
        return int(first), recent

    def _write(self, number: int, recent: list[tuple[int, tuple[str, str]]]) -> None:
        lines = [str(number), *(f"{at} {tenant}/{name}" for at, (tenant, name) in recent)]
        replace_file(self._path, seal(_KEY, "\n".join(lines)), self._aside)
