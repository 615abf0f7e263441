"""The files of a ledger: one scheduler writes each, by itself, and a new one by size and by day."""

import errno
import fcntl
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

SUFFIX = ".jsonl"
MAX_BYTES = 64 << 20
_NAME = re.compile(r"usage-(\d{4}-\d{2}-\d{2})-([0-9a-f]{12})-\d{6}\.jsonl")


def day_of(seconds: float) -> str:
    """The day in UTC, as YYYY-MM-DD."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def day_in(name: str) -> str:
    """The day in a file's name; "" for what is no file of a ledger."""
    match = _NAME.fullmatch(name)
    return match[1] if match else ""


def lock(descriptor: int) -> bool:
    """Whether nobody else had a file: until it is closed nobody else gets it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LedgerFile:
    """Appends lines on one thread; `sync` may run on another. A line is whole in the file, or not there.

    A killed process loses nothing that was appended. What a machine that fails loses is what came after the
    last `sync`.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        """Makes the folder if need be; raises OSError when that cannot be written to. `clock` tells unix
        seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        self.folder = folder
        self.scheduler = uuid.uuid4().hex[:12]
        self._max_bytes, self._clock = max_bytes, clock
        self._number = 0
        self._descriptor = -1  # Of the file that is written.
        self._name, self._day, self._size = "", "", 0
        self._full: list[int] = []  # Descriptors of files that get no more, and may not be on the disk yet.
        self._unsynced = False
        self._swap = threading.Lock()  # Guards the descriptors.

    @property
    def name(self) -> str:
        """The name of the file that is written; "" before the first line."""
        return self._name

    def append(self, line: bytes) -> None:
        """Raises OSError."""
        day = day_of(self._clock())
        if self._descriptor < 0 or day != self._day or self._size >= self._max_bytes:
            self._begin(day)
        try:
            if os.write(self._descriptor, line) < len(line):  # What fills a disk is written in part.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._take_back()
            raise
        self._size += len(line)
        self._unsynced = True

    def sync(self) -> None:
        """What was appended before is on the disk when this returns. Raises OSError."""
        with self._swap:
            full, self._full = self._full, []
            if self._unsynced and self._descriptor >= 0:
                self._unsynced = False
                full.append(os.dup(self._descriptor))
        try:
            for descriptor in full:
                os.fsync(descriptor)
        finally:
            for descriptor in full:
                os.close(descriptor)

    def close(self) -> None:
        self._end()
        self.sync()

    def _begin(self, day: str) -> None:
        self._end()
        while True:
            self._number += 1
            name = f"usage-{day}-{self.scheduler}-{self._number:06}{SUFFIX}"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self.folder / name, flags, 0o640)
            if lock(descriptor):
                break
            os.close(descriptor)  # Another scheduler took it for one that was left behind.
        with self._swap:
            self._descriptor, self._name, self._day, self._size = descriptor, name, day, 0

    def _take_back(self) -> None:
        """What a failed write may have left. Where that fails, too, the file is given up: its last line is
        torn, as after a crash."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self._end()

    def _end(self) -> None:
        with self._swap:
            if self._descriptor >= 0:
                self._full.append(self._descriptor)
            self._descriptor, self._name = -1, ""
