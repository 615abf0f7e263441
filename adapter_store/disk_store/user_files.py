"""Which names have a version, by its digest: `users/<hex>`, sealed, a line "tenant/name" for each.

It may name too many, after a crash, and never too few: whoever asks looks at their records.
"""

import logging
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from adapter_store.disk_store.record_files import RecordFiles
from adapter_store.errors import DataLoss
from adapter_store.files.durable import replace_file, sync_folder
from adapter_store.files.seal import seal, unseal

_log = logging.getLogger(__name__)
Name = tuple[str, str]  # tenant, name


class UserFiles:
    """Reading needs no lock. Writers hold the store's; a crash may leave half-written files in `aside`."""

    def __init__(self, folder: Path, aside: Path, records: RecordFiles) -> None:
        self._folder, self._aside, self._records = folder, aside, records

    def make(self) -> None:
        """Under the lock: from all records, of a store that has no such files yet. Raises OSError."""
        if self._folder.exists():
            return
        users: dict[str, list[Name]] = {}
        for name, digest in self._records.mentions():
            users.setdefault(digest, []).append(name)
        building = self._aside / uuid.uuid4().hex
        building.mkdir()
        for digest, names in users.items():
            (building / _file(digest)).write_bytes(_sealed(digest, names))
        os.sync()  # once, for what may be a hundred thousand files
        building.rename(self._folder)
        sync_folder(self._folder.parent)

    def names(self, digest: str) -> list[Name]:
        """Sorted. Raises OSError."""
        try:
            text = unseal(_key(digest), (self._folder / _file(digest)).read_bytes())
        except FileNotFoundError:
            self._folder.stat()  # or the whole store is away
            return []
        except DataLoss as error:
            _log.error("adapter store: who has %s is looked up in all records: %s", digest, error)
            return sorted(name for name, each in self._records.mentions() if each == digest)
        return sorted(_name(line) for line in text.splitlines())

    def digests(self, name: Name) -> list[str]:
        """The digests of all content that a name has, by looking at everybody's. Sorted. Raises OSError."""
        found = (f"sha256:{file}" for file in sorted(os.listdir(self._folder)))
        return [digest for digest in found if name in self.names(digest)]

    def add(self, digest: str, name: Name) -> None:
        """Before the record has the version."""
        names = self.names(digest)
        if name not in names:
            self._write(digest, [*names, name])

    def remove(self, digest: str, name: Name) -> None:
        """After the record has lost it."""
        self._write(digest, [each for each in self.names(digest) if each != name])

    def _write(self, digest: str, names: Iterable[Name]) -> None:
        path = self._folder / _file(digest)
        if names := sorted(names):
            replace_file(path, _sealed(digest, names), self._aside)
        else:
            path.unlink(missing_ok=True)
            sync_folder(self._folder)


def _sealed(digest: str, names: Iterable[Name]) -> bytes:
    return seal(_key(digest), "\n".join(f"{tenant}/{name}" for tenant, name in names))


def _key(digest: str) -> str:
    return f"users {digest}"


def _file(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _name(line: str) -> Name:
    tenant, _, name = line.partition("/")
    return tenant, name
