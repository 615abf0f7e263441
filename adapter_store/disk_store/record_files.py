"""The records of a DiskStore: `<tenant>/<name>.json`, sealed, each replaced whole."""

import functools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import DataLoss
from adapter_store.files.durable import replace_file, sync_folder
from adapter_store.files.seal import seal, unseal
from adapter_store.record import NameRecord, naming
from adapter_store.ref import check_identifier
from adapter_store.summary import lines_of

_CACHED_RECORDS = 4096
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class RecordFiles:
    """Reading needs no lock. Writers hold the store's; a crash may leave half-written files in `aside`."""

    def __init__(self, folder: Path, aside: Path) -> None:
        self._folder, self._aside = folder, aside
        self._parse = functools.lru_cache(_CACHED_RECORDS)(_decode)

    def read(self, tenant: str, name: str) -> NameRecord:
        """An unknown name has the empty record. Raises DataLoss, OSError, and InvalidRef before it reads."""
        try:
            with naming(tenant, name):
                return self._parse(f"{tenant}/{name}", self._path(tenant, name).read_bytes())
        except FileNotFoundError:
            self._folder.stat()  # or the whole store is away, which says nothing about the name
            return NameRecord()

    def write(self, tenant: str, name: str, record: NameRecord) -> None:
        """A record without versions is removed."""
        path = self._path(tenant, name)
        if not record.versions:
            path.unlink()
            sync_folder(path.parent)
            return
        if not path.parent.exists():
            path.parent.mkdir()
            sync_folder(self._folder)
        replace_file(path, seal(f"{tenant}/{name}", record.to_json()), self._aside)

    def names(self, tenant: str, name: str | None = None) -> list[str]:
        """All of a tenant's names, or the one given, in the order of "name@digest"."""
        folder = self._folder / check_identifier("tenant", tenant)
        if name is not None:
            return [check_identifier("name", name)]
        self._folder.stat()
        try:
            names = [file.removesuffix(".json") for file in os.listdir(folder)]
        except FileNotFoundError:
            return []
        return sorted(names, key=lambda name: f"{name}@")

    def tenants(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def lines(self, tenant: str, name: str) -> tuple[str, ...]:
        """Lines for listings (../summary.py), sorted; none when the name is unknown or its record
        unreadable."""
        return tuple(sorted(lines_of(name, self._listed(tenant, name))))

    def all_lines(self, files: set[str]) -> dict[str, dict[str, tuple[str, ...]]]:
        """Lines by tenant and name, of all names; no lines: it is damaged, which is logged. Which sets of
        pushed files the records name is added to `files`."""
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for tenant in os.listdir(self._folder):
            named = found[tenant] = {}
            for file in os.listdir(f"{self._folder}/{tenant}"):
                name = file.removesuffix(".json")
                record = self._listed(tenant, name)
                named[name] = tuple(sorted(lines_of(name, record)))
                files |= record.push_files()
        return found

    def _listed(self, tenant: str, name: str) -> NameRecord:
        """Empty when it is unknown, or unreadable, which is logged."""
        try:
            return _decode(f"{tenant}/{name}", _read(f"{self._folder}/{tenant}/{name}.json"))
        except FileNotFoundError:
            return NameRecord()
        except DataLoss as error:  # the others are listed all the same
            _log.error("adapter store: %s/%s is not listed: %s", tenant, name, error)
            return NameRecord()

    def mentions(self) -> Iterator[tuple[tuple[str, str], str]]:
        """(tenant, name), and a digest that its record mentions, damaged or not, for all of them."""
        for tenant in os.listdir(self._folder):
            for file in os.listdir(f"{self._folder}/{tenant}"):
                value = _read(f"{self._folder}/{tenant}/{file}")
                for digest in sorted(set(_DIGEST.findall(value))):
                    yield (tenant, file.removesuffix(".json")), digest.decode()

    def read_if_whole(self, tenant: str, name: str) -> NameRecord | None:
        """None for a damaged one, which is logged. Raises OSError."""
        try:
            return self.read(tenant, name)
        except DataLoss as error:
            _log.error("adapter store: what is said of %s/%s is damaged: %s", tenant, name, error)
            return None

    def whole(self, tenant: str) -> Iterator[tuple[str, NameRecord]]:
        """All names of a tenant whose records can be read. One that is damaged hides no other."""
        for name in self.names(tenant):
            if (record := self.read_if_whole(tenant, name)) is not None:
                yield name, record

    def damaged(self, tenant: str) -> list[str]:
        """Names whose records cannot be read."""
        return [name for name in self.names(tenant) if self.read_if_whole(tenant, name) is None]

    def _path(self, tenant: str, name: str) -> Path:
        return self._folder / check_identifier("tenant", tenant) / f"{check_identifier('name', name)}.json"


def _read(path: str) -> bytes:
    """Without the objects of pathlib: where a hundred thousand files are read, they take most of the time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _decode(key: str, value: bytes) -> NameRecord:
    """Raises DataLoss."""
    return NameRecord.from_json(unseal(key, value))
