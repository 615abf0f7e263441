"""The leases of a DiskStore (../lease.py): `leases/<holder>`, whose time is that of the last renewal.

Nothing is synced: a crash of the whole machine ends the holders, too.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from adapter_store.lease import LEASE_S, Lease

_NEW = ".new-"  # what is being written


class LeaseFiles:
    """Any method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def now(self) -> float:
        """The time by the clock of the file system, which may be another machine's."""
        return self._write(b"", None)

    def hold(self, lease: Lease) -> None:
        self._write(lease.to_bytes(), self._folder / lease.holder)

    def let_go(self, holder: str) -> None:
        (self._folder / holder).unlink(missing_ok=True)

    def all(self) -> Iterator[Lease]:
        """Those that count. Removes others, and what a writer that was killed left."""
        now = self.now()
        for path in sorted(self._folder.iterdir()):
            try:
                with path.open("rb") as file:
                    age_s = now - os.fstat(file.fileno()).st_mtime
                    lease = None if path.name.startswith(_NEW) else Lease.from_bytes(path.name, file.read())
            except FileNotFoundError:
                continue
            if age_s > (lease.seconds if lease else LEASE_S):
                path.unlink(missing_ok=True)
            elif lease:
                yield lease

    def _write(self, value: bytes, path: Path | None) -> float:
        """Under a name that nobody else has, then in place, if it has one. When that was."""
        temporary = self._folder / f"{_NEW}{uuid.uuid4().hex}"
        with temporary.open("wb") as file:
            file.write(value)
            file.flush()
            written_at = os.fstat(file.fileno()).st_mtime
        if path is None:
            temporary.unlink(missing_ok=True)
        else:
            temporary.replace(path)
        return written_at
