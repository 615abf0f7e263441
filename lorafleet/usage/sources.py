"""Where records are read: folders of ledger files, and the streams of a store's Redis."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorafleet.errors import LaunchError

_FILE = re.compile(r"usage-(\d{4}-\d{2}-\d{2})-.*\.jsonl")


class Source(Protocol):
    def num_bytes(self) -> int:
        """About what `lines` brings."""

    def lines(self) -> Iterator[bytes]:
        """The lines as they were written, and torn ones."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A --ledger-dir. Days before `first_day` (YYYY-MM-DD) are left out."""

    path: Path
    first_day: str

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths())

    def lines(self) -> Iterator[bytes]:
        """A file that goes meanwhile was shipped long ago."""
        for path in self._paths():
            with suppress(FileNotFoundError), path.open("rb") as file:
                yield from file

    def _paths(self) -> list[Path]:
        """Raises LaunchError for what is no folder."""
        if not self.path.is_dir():
            raise LaunchError(f"--ledger-dir: {self.path} is no folder")
        found = ((path, _FILE.fullmatch(path.name)) for path in sorted(self.path.iterdir()))
        return [path for path, match in found if match and match[1] >= self.first_day]


class RedisStreams:
    """A store's Redis. Raises LaunchError for a url that is none, or a server that does not answer."""

    _LINE_BYTES = 300

    def __init__(self, url: str, first_day: str) -> None:
        try:
            from adapter_store import AdapterStoreError
            from adapter_store.redis_store.usage_streams import UsageStreams
        except ModuleNotFoundError as error:
            raise LaunchError(f"--store needs {error.name}: pip install 'lorafleet[redis]'") from error
        self._error = AdapterStoreError
        try:
            self._streams = UsageStreams.open(url, allow_volatile=True)
            self._days = [day for day in self._streams.days() if day >= first_day]
        except AdapterStoreError as error:
            raise LaunchError(f"--store: {error}") from error

    def num_bytes(self) -> int:
        return sum(map(self._streams.count, self._days)) * self._LINE_BYTES

    def lines(self) -> Iterator[bytes]:
        try:
            for day in self._days:
                yield from self._streams.read(day)
        except self._error as error:
            raise LaunchError(f"--store: {error}") from error
