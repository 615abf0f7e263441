"""The folders of pushes and pulls under way: bounded by tenant, swept when a scheduler begins.

Each scheduler has a folder of its own, which it holds locked while it lives; one that nobody holds was left
by a scheduler that was killed.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lorafleet.doors.held import Held
from scheduler.errors import TooMuchHeld

logger = logging.getLogger(__name__)

PREFIX = "lorafleet-spool-"
THREADS = 4


class Spool:
    """Used from one event loop, but for what says that it blocks. It has threads of its own for what takes
    long with such folders."""

    def __init__(
        self, parent: Path | None, most: int, share: Callable[[str], int], threads: int = THREADS
    ) -> None:
        """A new folder in `parent`, by default the one for temporary files. `most` bytes in all, and
        `share(tenant)` of one. Blocks while it sweeps. Raises OSError."""
        folder = Path(tempfile.gettempdir()) if parent is None else parent
        _sweep(folder)
        self._lock, self.folder = _locked_folder(folder)
        full, what = partial(TooMuchHeld, "SPOOL_FULL"), "bytes of pushes and pulls under way"
        self._bytes = Held(what, most, full, share, beyond=1.0)
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="transfers")

    def place(self, tenant: str) -> "Place":
        """A new folder in it. Blocks. Raises OSError."""
        return Place(Path(tempfile.mkdtemp(dir=self.folder)), tenant, self._bytes)

    def close(self) -> None:
        """Removes it with all that is in it. Blocks."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


class Place:
    """The folder of one push or pull."""

    def __init__(self, folder: Path, tenant: str, held: Held) -> None:
        self.folder = folder
        self._tenant = tenant
        self._held = held
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Before so much more is written. Raises TooMuchHeld."""
        self._held.take(self._tenant, num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Its bytes. The folder goes, too, if it is there still."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._held.give_back(self._tenant, self._num_bytes)


def _locked_folder(parent: Path) -> tuple[int, Path]:
    """The lock is on the folder itself, so that nothing that tidies up can part the two."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(OSError):  # Another has swept it before it was locked.
            return _lock(folder), folder


def _lock(folder: Path) -> int:
    """Raises OSError when it is locked, is gone, or is not this user's own folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there, locked = folder.lstat(), os.fstat(descriptor)
        if (there.st_ino, there.st_dev, there.st_uid) != (locked.st_ino, locked.st_dev, os.getuid()):
            raise FileNotFoundError(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(parent: Path) -> None:
    for folder in _left_behind(parent):
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("swept %s, which a scheduler that was killed left behind", folder)


def _left_behind(parent: Path) -> Iterator[Path]:
    """Each is locked while it is swept."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = _lock(folder)
        except OSError:
            continue
        try:
            yield folder
        finally:
            os.close(lock)
