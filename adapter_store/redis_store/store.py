"""RedisStore: the store's contract, put together from its parts."""

import builtins
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from adapter_store.blob import Blob
from adapter_store.disk import MAX_FILE_BYTES
from adapter_store.durable import medium_errors
from adapter_store.errors import AdapterNotFound, AdapterStoreError, DataLoss, StoreUnavailable
from adapter_store.manifest import Alias, Manifest, Version
from adapter_store.model_spec import ModelSpec
from adapter_store.packed import Weights
from adapter_store.peft import read_adapter
from adapter_store.record import NameRecord
from adapter_store.redis_store.index import Claim, Index
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata, Publication
from adapter_store.redis_store.notices import Notices
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.read import Reader
from adapter_store.redis_store.upload import Uploader
from adapter_store.redis_store.url import RedisUrl
from adapter_store.ref import Ref, check_digest, check_identifier
from adapter_store.source import copy_source, drop_checked
from adapter_store.watch import Watcher

_PACKED, _SOURCE = "packed.safetensors", "source/"
_CACHED_MANIFESTS = 1024
_RACES = 100  # changes of one name by others that a change stands
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class RedisStore:
    """An AdapterStore (store.py has the contract of each method)."""

    def __init__(self, url: RedisUrl, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises StoreUnavailable; UnsafeStore when the server may lose what it acknowledged."""
        self._max_file_bytes = max_file_bytes
        self._primary = Primary(url)
        keys = Keys(url.namespace)
        self._channel = keys.channel
        self._metadata = Metadata(self._primary, keys)
        self._uploader = Uploader(self._primary, keys, self._metadata)
        self._reader = Reader(self._primary, keys, self._metadata)
        self._watchers: set[Watcher] = set()
        self._notices: Notices | None = None
        self._mutex = threading.Lock()  # guards the two above
        self._manifest = functools.lru_cache(_CACHED_MANIFESTS)(self._read_manifest)
        with _whatever_happens_to_garbage():
            self._metadata.sweep()

    def put(
        self,
        source: Path,
        tenant: str,
        name: str,
        spec: ModelSpec,
        *,
        alias: str | None = "latest",
        strict_base: bool = False,
        expected_generation: int | None = None,
        dry_run: bool = False,
    ) -> Version:
        check_identifier("tenant", tenant)
        check_identifier("name", name)
        if alias is not None:
            check_identifier("alias", alias)
        with _workspace() as blob:
            copy_source(source, blob.source, self._max_file_bytes)
            adapter = read_adapter(blob.source, spec, strict_base=strict_base)
            drop_checked(blob.source)
            with medium_errors():
                manifest = blob.write(adapter)
            if dry_run:
                return Version(tenant, name, manifest.digest, manifest, time.time(), protected=False)
            ref = Ref(tenant, name, digest=manifest.digest)
            return self._publish(blob, manifest, ref, alias, expected_generation)

    def resolve(self, ref: Ref, sticky_key: str | None = None) -> Version:
        record = self._metadata.record(ref.tenant, ref.name).record
        return self._version(ref, record, record.digest_of(ref))

    def open(self, digest: str) -> Weights:
        check_digest(digest)
        return self._reader.whole(digest, self._weights)

    def list(
        self, tenant: str, *, name: str | None = None, after: str = "", limit: int = 100
    ) -> builtins.list[Version]:
        found = []
        for names in self._names(tenant, name, after, limit):
            for each, read in self._metadata.records(tenant, names):
                digests = sorted(digest for digest in read.record.versions if f"{each}@{digest}" > after)
                found += [(each, digest, read.record.versions[digest]) for digest in digests]
            if len(found) >= limit:
                break
        manifests = self._metadata.manifests(digest for _, digest, _ in found[:limit])
        return [
            Version(tenant, each, digest, manifests[digest], entry.created_at, entry.protected)
            for each, digest, entry in found[:limit]
            if digest in manifests  # or it was deleted while we read
        ]

    def delete(self, ref: Ref) -> None:
        def attempt() -> bool:
            old = self._metadata.record(ref.tenant, ref.name)
            version = Ref(ref.tenant, ref.name, digest=old.record.digest_of(ref))
            new = old.record.without_version(ref)
            return self._metadata.commit(version, old, new, "remove") == "done"

        _race(attempt)
        self._manifest.cache_clear()
        self._changed()

    def set_alias(
        self, tenant: str, name: str, alias: str, digest: str, *, expected_generation: int | None = None
    ) -> Alias:
        check_identifier("alias", alias)
        ref = Ref(tenant, name, digest=digest)
        record = self._change(ref, lambda record: record.with_alias(alias, ref, expected_generation))
        return Alias(tenant, name, alias, digest, record.aliases[alias].generation)

    def delete_alias(self, tenant: str, name: str, alias: str) -> None:
        ref = Ref(tenant, name, alias=alias)
        self._change(ref, lambda record: record.without_alias(alias, ref))

    def aliases(self, tenant: str, name: str | None = None) -> builtins.list[Alias]:
        return [
            Alias(tenant, each, alias, entry.digest, entry.generation)
            for names in self._names(tenant, name)
            for each, read in self._metadata.records(tenant, names)
            for alias, entry in sorted(read.record.aliases.items())
            if entry.digest is not None
        ]

    def set_protected(self, tenant: str, name: str, digest: str, protected: bool) -> Version:
        ref = Ref(tenant, name, digest=digest)
        record = self._change(ref, lambda record: record.with_protection(ref, protected))
        return self._version(ref, record, digest)

    def export(self, ref: Ref, target: Path) -> None:
        version = self.resolve(ref)
        with tempfile.TemporaryDirectory(prefix="lorafleet-export-") as name:
            folder = Path(name)
            self._reader.whole(version.digest, lambda _, index: self._copy_source(index, folder))
            target.mkdir(parents=True, exist_ok=True)
            if any(target.iterdir()):
                raise FileExistsError(f"{target} is not empty")
            for file in folder.iterdir():
                shutil.copyfile(file, target / file.name)

    def verify(self, ref: Ref) -> Version:
        version = self.resolve(ref)
        self._reader.whole(version.digest, self._check)
        return version

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        watcher = Watcher(self._metadata.changes, callback)
        with self._mutex:
            self._watchers.add(watcher)
            if self._notices is None:
                self._notices = Notices(self._primary, self._channel, self._wake)

        def stop() -> None:
            with self._mutex:
                self._watchers.discard(watcher)
                if not self._watchers and self._notices is not None:
                    self._notices.stop()
                    self._notices = None
            watcher.stop()

        return stop

    # ---- reading

    def _names(
        self, tenant: str, name: str | None, after: str = "", limit: int = 1000
    ) -> Iterator[builtins.list[str]]:
        check_identifier("tenant", tenant)
        if name is not None:
            return iter([[check_identifier("name", name)]])
        first, at, _ = after.partition("@")
        return self._metadata.names(tenant, first + at, limit)

    def _version(self, ref: Ref, record: NameRecord, digest: str) -> Version:
        entry = record.versions[digest]
        manifest = self._manifest(digest)
        return Version(ref.tenant, ref.name, digest, manifest, entry.created_at, entry.protected)

    def _read_manifest(self, digest: str) -> Manifest:
        found = self._metadata.manifests([digest])
        if digest not in found:
            raise AdapterNotFound(f"adapter version {digest} was not found")
        return found[digest]

    def _weights(self, manifest: Manifest, index: Index) -> Weights:
        """In memory that lives as long as the mapping."""
        with medium_errors(), os.fdopen(os.memfd_create("lorafleet-adapter"), "w+b") as file:
            self._reader.copy(index, index.file(_PACKED), file)
            file.flush()
            return Weights(Path(f"/proc/self/fd/{file.fileno()}"), manifest)

    def _check(self, manifest: Manifest, index: Index) -> None:
        self._weights(manifest, index).close()
        for file in index.files:
            if file.name.startswith(_SOURCE):
                self._reader.copy(index, file)

    def _copy_source(self, index: Index, folder: Path) -> None:
        for file in index.files:
            if file.name.startswith(_SOURCE):
                with (folder / file.name.removeprefix(_SOURCE)).open("wb") as target:
                    self._reader.copy(index, file, target)

    # ---- changing

    def _publish(
        self, blob: Blob, manifest: Manifest, ref: Ref, alias: str | None, expected_generation: int | None
    ) -> Version:
        created_at = time.time()

        def change(record: NameRecord) -> NameRecord:
            new = record.with_version(manifest.digest, created_at)
            return new if alias is None else new.with_alias(alias, ref, expected_generation)

        change(self._metadata.record(ref.tenant, ref.name).record)  # refused before gigabytes travel
        record = None
        if self._is_healthy(manifest.digest):
            record = self._commit(ref, change, None)
        if record is None:
            self._manifest.cache_clear()
            record = self._upload_and_commit(blob, manifest, ref, change)
        self._changed()
        return self._version(ref, record, manifest.digest)

    def _is_healthy(self, digest: str) -> bool:
        """Whether the content is stored already, and whole."""
        try:
            self._reader.whole(digest, self._check)
        except (AdapterNotFound, DataLoss):
            return False
        return True

    def _upload_and_commit(
        self, blob: Blob, manifest: Manifest, ref: Ref, change: Callable[[NameRecord], NameRecord]
    ) -> NameRecord:
        files = {_PACKED: blob.packed}
        files |= {_SOURCE + file.name: file for file in sorted(blob.source.iterdir())}
        with medium_errors():
            index = self._uploader.upload(manifest.digest, files)
        try:
            record = self._commit(ref, change, Publication(manifest, index))
        except StoreUnavailable:
            raise  # it may be published: if it is not, it falls due by itself
        except AdapterStoreError:
            self._abandon(index.claim)
            raise
        if record is None:
            raise StoreUnavailable("the push took too long and was given up: push the adapter again")
        return record

    def _commit(
        self, ref: Ref, change: Callable[[NameRecord], NameRecord], publication: Publication | None
    ) -> NameRecord | None:
        """The record with a version added; None when the version's content, or the upload, is gone."""

        def attempt() -> tuple[NameRecord | None] | None:
            old = self._metadata.record(ref.tenant, ref.name)
            new = change(old.record)
            if new == old.record and publication is None:
                return (new,)
            outcome = self._metadata.commit(ref, old, new, "add", publication)
            return None if outcome == "stale" else (new if outcome == "done" else None,)

        return _race(attempt)[0]

    def _change(self, ref: Ref, change: Callable[[NameRecord], NameRecord]) -> NameRecord:
        def attempt() -> NameRecord | None:
            old = self._metadata.record(ref.tenant, ref.name)
            new = change(old.record)
            done = new == old.record or self._metadata.commit(ref, old, new) == "done"
            return new if done else None

        record = _race(attempt)
        self._wake()
        return record

    def _abandon(self, claim: Claim) -> None:
        with _whatever_happens_to_garbage():
            self._metadata.abandon(claim)
            self._metadata.sweep()

    def _changed(self) -> None:
        self._wake()
        with _whatever_happens_to_garbage():
            self._metadata.sweep()

    def _wake(self) -> None:
        with self._mutex:
            watchers = [*self._watchers]
        for watcher in watchers:
            watcher.wake()


def _race(attempt: Callable[[], _T | None]) -> _T:
    """Until an attempt was not overtaken by somebody else's change; that shows as None or False."""
    for _ in range(_RACES):
        if result := attempt():
            return result
    raise StoreUnavailable("others keep changing this adapter: try again")


@contextlib.contextmanager
def _whatever_happens_to_garbage() -> Iterator[None]:
    """What was acknowledged, or refused, stays so."""
    try:
        yield
    except StoreUnavailable as error:
        _log.warning("adapter store: garbage stays for now: %s", error)


@contextlib.contextmanager
def _workspace() -> Iterator[Blob]:
    with medium_errors(), tempfile.TemporaryDirectory(prefix="lorafleet-push-") as name:
        yield Blob(Path(name))
