"""Ships a ledger's files to Redis, those of a predecessor as well, and deletes them in time."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adapter_store import AdapterStoreError
from lorafleet.usage.record import is_whole
from scheduler.ledger.files import LedgerFile, day_in, lock

logger = logging.getLogger(__name__)

EVERY_S = 1.0
DAY_S = 86400
_READ_BYTES = 256 << 10  # About a thousand records: one exchange with the server.
_TOLD = ".shipped"  # Of the file beside another that tells how many of its bytes were shipped.


class Streams(Protocol):
    """adapter_store.redis_store.usage_streams.UsageStreams."""

    def append(self, day: str, lines: list[bytes], forget_at: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Keeping:
    """In days: how long files stay after they were shipped, and records in Redis (0 is for ever)."""

    files: float
    streams: int


class Shipper:
    """On a thread of its own. At least once: a record that may not have arrived is sent again."""

    def __init__(
        self,
        file: LedgerFile,
        open_streams: Callable[[], Streams],
        keeping: Keeping,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`open_streams` may raise AdapterStoreError, and is asked again then. `clock` tells unix seconds."""
        self._file, self._open, self._keeping, self._clock = file, open_streams, keeping, clock
        self._streams: Streams | None = None
        self._offsets: dict[str, int] = {}
        self._trouble = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger shipper", daemon=True)
        self.all_shipped_at = clock()  # All that was written by then has been shipped.

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """After a last turn, unless that takes longer."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def turn(self) -> None:
        """Ships what is there, and deletes what was there for long enough. Raises AdapterStoreError,
        OSError; what is not done then is done by the next turn."""
        began = self._clock()
        for path in sorted(self._file.folder.iterdir()):
            if day_in(path.name):
                self._look_after(path)
        self.all_shipped_at = began

    def _run(self) -> None:
        while True:
            last = self._stopping.wait(EVERY_S)
            try:
                self.turn()
            except (AdapterStoreError, OSError) as error:
                self._tell(str(error))
            except Exception:
                logger.exception("a turn of the ledger's shipper failed; the next one tries again")
            else:
                self._tell("")
            if last:
                return

    def _tell(self, trouble: str) -> None:
        """Once for each kind of trouble."""
        if trouble and trouble != self._trouble:
            logger.warning("usage records wait in %s: %s", self._file.folder, trouble)
        elif self._trouble and not trouble:
            logger.info("usage records are shipped again")
        self._trouble = trouble

    def _look_after(self, path: Path) -> None:
        is_own = self._file.scheduler in path.name
        is_growing = path.name == self._file.name  # Asked before it is read.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not is_own and not lock(descriptor):
                return  # Another scheduler writes it, or ships what it found.
            self._ship(path, descriptor)
            if not is_growing:
                self._delete_in_time(path)
        finally:
            os.close(descriptor)

    def _ship(self, path: Path, descriptor: int) -> None:
        """Up to the last whole line that is there."""
        offset = self._offset(path)
        while data := os.pread(descriptor, _READ_BYTES, offset):
            lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            if not lines:
                return  # One is torn, or being written.
            self._send(day_in(path.name), [line for line in lines if is_whole(line)])
            offset += sum(map(len, lines))
            self._offsets[path.name] = offset
            self._told(path).write_text(f"{offset}\n")

    def _send(self, day: str, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._streams is None:
            self._streams = self._open()
        kept = self._keeping.streams
        self._streams.append(day, lines, int(self._clock()) + (kept + 1) * DAY_S if kept else 0)

    def _offset(self, path: Path) -> int:
        """Nothing, where what was told cannot be read: then all of it is shipped again."""
        if path.name not in self._offsets:
            try:
                self._offsets[path.name] = int(self._told(path).read_text())
            except (OSError, ValueError):
                self._offsets[path.name] = 0
        return self._offsets[path.name]

    def _delete_in_time(self, path: Path) -> None:
        told = self._told(path)
        shipped_at = (told if told.exists() else path).stat().st_mtime
        if self._clock() - shipped_at > self._keeping.files * DAY_S:
            path.unlink()
            told.unlink(missing_ok=True)
            self._offsets.pop(path.name, None)

    def _told(self, path: Path) -> Path:
        return path.with_name(path.name + _TOLD)
