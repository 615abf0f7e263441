"""DiskStore: the store in a folder, shared by any number of processes on one machine.

    lock                            held for every change, for moments only
    changes                         how many there were, and of what (changes_file.py)
    blobs/<hex>/                    content, immutable once here, whoever pushed it (blob.py)
    pushes/<tenant>+<name>+<id>/    the files of one push, immutable, of that name alone (push_folder.py)
    names/<tenant>/<name>.json      versions and aliases, replaced whole (record_files.py)
    users/<hex>                     which names have that content (user_files.py)
    leases/<holder>                 what schedulers still use (lease_files.py)
    format-4, secret                what it is, and how it is kept (store_folder.py)
    tmp/                            work in progress, and what crashes left

A push works in tmp/ without the lock; then, under it, one rename publishes the content, one the pushed files
and one more the record. A crash in between leaves what no record names; the next store opened here removes
it, but for those that only read.
"""

import contextlib
import functools
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from adapter_store.catalogue import Arrival, Catalogue, Change, aliases_in
from adapter_store.disk_store.blob import Blob, Blobs
from adapter_store.disk_store.changes_file import ChangesFile
from adapter_store.disk_store.lease_files import LeaseFiles
from adapter_store.disk_store.listing import Listings
from adapter_store.disk_store.push_folder import PushFolder, PushFolders
from adapter_store.disk_store.record_files import RecordFiles
from adapter_store.disk_store.store_folder import claim_folder, secret_of
from adapter_store.disk_store.user_files import UserFiles
from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.durable import (
    claimed,
    exclusive,
    exclusive_if_free,
    medium_errors,
    remove_unclaimed,
    sync_folder,
    sync_tree,
)
from adapter_store.lease import Lease
from adapter_store.manifest import Alias, Manifest, PushOptions, Version
from adapter_store.model_spec import ModelSpec
from adapter_store.packed.form import Weights
from adapter_store.peft.source import take_adapter
from adapter_store.pushed import PushedFiles
from adapter_store.record import NameRecord, News
from adapter_store.ref import Ref, check_digest, check_identifier
from adapter_store.summary import Summary, hex_of, is_deleted, is_shown, parse_lines

_CACHED_MANIFESTS = 1024
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class DiskStore(Catalogue):
    """An AdapterStore (../store.py has the contract of each method)."""

    def __init__(self, root: Path, *, create: bool = True) -> None:
        """`create`, for who changes it: a folder that is missing or empty becomes a store; all records are
        read, for listings, and what crashes left goes. Raises NoStore, OtherFormat, StoreUnavailable."""
        self._root = root
        self._tmp = root / "tmp"
        self._records = RecordFiles(root / "names", aside=self._tmp)
        self._blobs, self._pushes = Blobs(root / "blobs"), PushFolders(root / "pushes", self._records)
        self._users = UserFiles(root / "users", self._tmp, self._records)
        self._changes = ChangesFile(root / "changes", aside=self._tmp)
        self._leases = LeaseFiles(root / "leases")
        self._listings = Listings(self._records, self.news)
        self._cached_manifest = functools.lru_cache(_CACHED_MANIFESTS)(self._read_manifest)
        with medium_errors():
            claim_folder(root, create=create)
            for folder in ("blobs", "pushes", "names", "leases", "tmp"):
                (root / folder).mkdir(parents=True, exist_ok=True)
            if create:
                with self._locked():
                    self._read_all()
                    self._users.make()

    def _put(self, source: Path, tenant: str, name: str, spec: ModelSpec, options: PushOptions) -> Version:
        with self._workspace() as work:
            blob, pushed = Blob(work / "blob"), PushFolder(work / "push")
            pushed.folder.mkdir()
            adapter = take_adapter(source, pushed.files, spec, options)
            arrival = Arrival(tenant, name, blob.write(adapter, options.digest), adapter.push, options)
            if options.dry_run:
                return arrival.version()
            pushed.write(arrival.ref, adapter)
            sync_tree(work)
            return self._publish(blob, pushed, arrival)

    def record(self, tenant: str, name: str) -> NameRecord:
        with medium_errors():
            return self._records.read(tenant, name)

    def tenants(self) -> list[str]:
        with medium_errors():
            return [tenant for tenant in self._records.tenants() if self._records.names(tenant)]

    def manifest(self, digest: str) -> Manifest:
        with medium_errors():
            return self._cached_manifest(check_digest(digest))

    def open(self, digest: str) -> Weights:
        check_digest(digest)
        return self._certain(lambda: self._blobs.open(digest))

    def count(self, tenant: str) -> int:
        with medium_errors():
            return self._listings.count(check_identifier("tenant", tenant))

    def _lines(self, tenant: str, name: str | None, after: str, limit: int, deleted: bool) -> list[str]:
        with medium_errors():
            return self._listings.page(tenant, name, after, limit, partial(is_shown, deleted=deleted))

    def aliases(self, tenant: str, name: str | None = None) -> list[Alias]:
        with medium_errors():
            if name is not None:
                return [*aliases_in(tenant, name, self._records.read(tenant, name))]
            return [
                alias
                for each, record in self._records.whole(tenant)
                for alias in aliases_in(tenant, each, record)
            ]

    def upload(self, ref: Ref) -> str:
        with medium_errors():
            record = self._records.read_if_whole(ref.tenant, ref.name)
            entry = record.versions.get(ref.digest or "") if record is not None else None
            if entry is None:
                return ""
            return f"{self._blobs.of(str(ref.digest)).upload()} {entry.push.files}"

    def now(self) -> float:
        with medium_errors():
            return self._leases.now()

    def hold(self, lease: Lease) -> None:
        with medium_errors():
            self._leases.hold(lease)

    def let_go(self, holder: str) -> None:
        with medium_errors():
            self._leases.let_go(holder)

    def leases(self) -> list[Lease]:
        with medium_errors():
            return list(self._leases.all())

    def exchange(self, holder: str, text: str, seconds: float) -> None:
        """Nobody: a folder is too slow for that."""

    def secret(self) -> bytes:
        with medium_errors(), self._locked():
            return secret_of(self._root, self._tmp)

    def orphans(self) -> list[str]:
        with medium_errors(), self._locked():
            blobs = (f"sha256:{each.name}" for each in self._blobs.root.iterdir() if each.is_dir())
            unused = [digest for digest in blobs if not self._is_used(digest)]
            return sorted([*unused, *(f"push {folder}" for folder in self._pushes.unnamed())])

    def damaged(self, tenant: str) -> list[str]:
        with medium_errors():
            return self._records.damaged(check_identifier("tenant", tenant))

    def _users_of(self, digest: str) -> list[tuple[str, str, NameRecord | None]]:
        with medium_errors():
            names = self._users.names(check_digest(digest))
            return [(*name, self._records.read_if_whole(*name)) for name in names]

    def news(self, since: int) -> News:
        with medium_errors():
            if self._changes.is_unsettled:
                with exclusive_if_free(self._root / "lock") as alone:
                    if alone:  # so its process died
                        self._changes.settle()
            return self._changes.news(since)

    def problem(self) -> str:
        return ""

    # ---- reading

    def _certain(self, read: Callable[[], _T]) -> _T:
        """Content that looks damaged may just be on its way out or in: under the lock nothing moves."""
        with medium_errors():
            try:
                return read()
            except DataLoss:
                with self._locked():
                    return read()

    def _whole(self, ref: Ref) -> tuple[Version, Weights, PushedFiles]:
        version = self._find(ref)
        return version, self._blobs.of(version.digest).verified(version.digest), self._pushed(version)

    def _pushed(self, version: Version) -> PushedFiles:
        own = Ref(version.tenant, version.name, digest=version.digest)
        return self._pushes.of(own, version.push.files).read(own)

    def _read_manifest(self, digest: str) -> Manifest:
        return self._blobs.stored(digest).manifest()

    def _buried(self, before: float) -> Iterator[Summary]:
        with medium_errors():
            for tenant in self._records.tenants():
                for name in self._records.names(tenant):
                    for summary in parse_lines(tenant, filter(is_deleted, self._records.lines(tenant, name))):
                        entry = self._records.read(tenant, name).versions.get(summary.digest)
                        if entry is not None and entry.left_at <= before:
                            yield summary

    # ---- changing, under the lock

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return exclusive(self._root / "lock")

    @contextlib.contextmanager
    def _workspace(self) -> Iterator[Path]:
        with medium_errors():
            folder = self._tmp / uuid.uuid4().hex
            with contextlib.ExitStack() as stack:
                with self._locked():  # or a sweep could take the new folder for a crash's
                    folder.mkdir()
                    stack.enter_context(claimed(folder))
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, blob: Blob, pushed: PushFolder, arrival: Arrival) -> Version:
        ref, digest = arrival.ref, arrival.manifest.digest
        # They hash, so not under the lock.
        healthy, same = self._blobs.is_healthy(digest), self._pushes.same(pushed, ref)
        with self._locked():
            record = self._records.read(ref.tenant, ref.name)
            files = same if same in record.push_files() else uuid.uuid4().hex
            arrival.added(record, files)  # refused before content moves
            target = self._blobs.of(digest).folder
            if target.exists() and not healthy and not self._blobs.is_healthy(digest):
                self._discard(target)  # damaged: this push repairs it
            if not target.exists():
                blob.folder.rename(target)
                sync_folder(self._blobs.root)
            own = self._pushes.of(ref, files).folder
            if not own.exists():
                pushed.folder.rename(own)
                sync_folder(self._pushes.root)
            return self._version(ref, self._replace(ref, lambda record: arrival.added(record, files)), digest)

    def _is_used(self, digest: str) -> bool:
        """Whether any record uses it, as far as they can be read."""
        return any(record is None or digest in record.versions for *_, record in self._users_of(digest))

    def _change(self, ref: Ref, change: Change) -> NameRecord:
        with medium_errors(), self._locked():
            return self._replace(ref, change)

    def _change_content(self, ref: Ref, change: Change, upload: str) -> bool:
        with medium_errors(), self._locked():
            found = self.upload(ref) == upload
            if found:
                self._replace(ref, change)
            return found

    def _replace(self, ref: Ref, change: Change) -> NameRecord:
        old = self._records.read(ref.tenant, ref.name)
        new = change(old)
        if new != old:
            self._write_record(ref, old, new)
        return new

    def _replace_damaged(
        self, ref: Ref, make: Callable[[list[str]], NameRecord], *, dry_run: bool
    ) -> NameRecord:
        with medium_errors(), self._locked():
            if self._records.read_if_whole(ref.tenant, ref.name) is not None:
                raise AdapterNotFound(f"{ref.tenant}/{ref.name} has no damaged record")
            record = make(self._users.digests((ref.tenant, ref.name)))
            if not dry_run:
                self._write_record(ref, NameRecord(), record)
                for folder in self._pushes.of_name(ref):
                    self._discard(folder)  # which of them was of which version is lost
            return record

    def _remove(self, ref: Ref, change: Change) -> None:
        with medium_errors(), self._locked():
            record = self._records.read(ref.tenant, ref.name)
            digest = record.digest_of(ref)
            self._write_record(ref, record, change(record))
            self._cached_manifest.cache_clear()
            self._blobs.forget(digest)
            if not self._is_used(digest):
                self._discard(self._blobs.of(digest).folder)

    def _write_record(self, ref: Ref, old: NameRecord, new: NameRecord) -> None:
        name = (ref.tenant, ref.name)
        self._changes.begin(*name)
        for digest in new.versions.keys() - old.versions.keys():
            self._users.add(digest, name)
        self._records.write(*name, new)
        for digest in old.versions.keys() - new.versions.keys():
            self._users.remove(digest, name)
        for files in old.push_files() - new.push_files():
            self._discard(self._pushes.of(ref, files).folder)
        self._changes.settle()

    def _discard(self, folder: Path) -> None:
        """Out of sight in one rename, then gone: readers see a blob whole or not at all."""
        doomed = self._tmp / uuid.uuid4().hex
        with contextlib.suppress(FileNotFoundError):  # somebody else took it away
            folder.rename(doomed)
            shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()  # a hand's file

    def _read_all(self) -> None:
        """Removes garbage, and prepares listings with what was read for that."""
        remove_unclaimed(self._tmp)
        number, files = self._changes.number(), set[str]()
        found = self._records.all_lines(files)
        for tenant, named in found.items():
            self._listings.prepare(tenant, number, named)
        names = [lines for named in found.values() for lines in named.values()]
        if not all(names):  # one cannot be read: it may name any content, so keep all, and serve the others
            _log.warning("adapter store %s: garbage stays, a record cannot be read", self._root)
            return
        kept = {hex_of(line) for lines in names for line in lines}
        for folder in self._blobs.root.iterdir():
            if folder.name not in kept:
                self._discard(folder)
        for folder in self._pushes.beside(files):
            self._discard(folder)
