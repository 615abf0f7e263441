"""RedisStore: the store's contract, put together from its parts."""

import builtins
import functools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from adapter_store.disk import MAX_FILE_BYTES
from adapter_store.durable import medium_errors
from adapter_store.errors import AdapterNotFound
from adapter_store.manifest import Alias, Manifest, Version
from adapter_store.model_spec import ModelSpec
from adapter_store.packed import Weights
from adapter_store.record import NameRecord
from adapter_store.redis_store.changes import Change, Changes
from adapter_store.redis_store.content import Content, prepare
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.notices import Notices
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.read import Reader
from adapter_store.redis_store.upload import Uploader
from adapter_store.redis_store.url import RedisUrl
from adapter_store.ref import Ref, check_digest, check_identifier
from adapter_store.source import take_adapter
from adapter_store.watch import Watcher

_CACHED_MANIFESTS = 1024
_ALIAS_PAGE = 256


class RedisStore:
    """An AdapterStore (store.py has the contract of each method)."""

    def __init__(self, url: RedisUrl, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises StoreUnavailable; UnsafeStore when the server may lose what it acknowledged."""
        self._max_file_bytes = max_file_bytes
        self._primary, keys = Primary(url), Keys(url.namespace)
        self._channel = keys.channel
        self._metadata = Metadata(self._primary, keys)
        self._content = Content(Reader(self._primary, keys, self._metadata))
        self._changes = Changes(self._metadata, Uploader(self._primary, keys, self._metadata), self._content)
        self._watchers: set[Watcher] = set()
        self._notices: Notices | None = None
        self._mutex = threading.Lock()  # guards the two above
        self._manifest = functools.lru_cache(_CACHED_MANIFESTS)(self._read_manifest)
        self._changes.sweep()

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
        with medium_errors(), tempfile.TemporaryDirectory(prefix="lorafleet-push-") as temporary:
            pushed = Path(temporary) / "source"
            adapter = take_adapter(source, pushed, spec, self._max_file_bytes, strict_base=strict_base)
            manifest, files = prepare(adapter, pushed)
            if dry_run:
                return Version(tenant, name, manifest.digest, manifest, time.time(), protected=False)
            ref = Ref(tenant, name, digest=manifest.digest)
            record = self._changes.publish(ref, manifest, files, alias, expected_generation)
        self._manifest.cache_clear()
        self._wake()
        return self._version(ref, record, manifest.digest)

    def resolve(self, ref: Ref, sticky_key: str | None = None) -> Version:
        record = self._metadata.record(ref.tenant, ref.name).record
        return self._version(ref, record, record.digest_of(ref))

    def open(self, digest: str) -> Weights:
        return self._content.weights(check_digest(digest))

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
        self._changes.remove(ref)
        self._manifest.cache_clear()
        self._wake()

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
            for names in self._names(tenant, name, "", _ALIAS_PAGE)
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
        with tempfile.TemporaryDirectory(prefix="lorafleet-export-") as temporary:
            self._content.restore(version.digest, Path(temporary))
            target.mkdir(parents=True, exist_ok=True)
            if any(target.iterdir()):
                raise FileExistsError(f"{target} is not empty")
            for file in Path(temporary).iterdir():
                shutil.copyfile(file, target / file.name)

    def verify(self, ref: Ref) -> Version:
        version = self.resolve(ref)
        self._content.check(version.digest)
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

    def _names(self, tenant: str, name: str | None, after: str, page: int) -> Iterator[builtins.list[str]]:
        """Pages of the tenant's names that may have a version after `after`, or the one name given."""
        check_identifier("tenant", tenant)
        if name is not None:
            return iter([[check_identifier("name", name)]])
        first, at, _ = after.partition("@")
        return self._metadata.names(tenant, first + at, page)

    def _version(self, ref: Ref, record: NameRecord, digest: str) -> Version:
        entry = record.versions[digest]
        manifest = self._manifest(digest)
        return Version(ref.tenant, ref.name, digest, manifest, entry.created_at, entry.protected)

    def _read_manifest(self, digest: str) -> Manifest:
        found = self._metadata.manifests([digest])
        if digest not in found:
            raise AdapterNotFound(f"adapter version {digest} was not found")
        return found[digest]

    def _change(self, ref: Ref, change: Change) -> NameRecord:
        record = self._changes.change(ref, change)
        self._wake()
        return record

    def _wake(self) -> None:
        with self._mutex:
            watchers = [*self._watchers]
        for watcher in watchers:
            watcher.wake()
