"""RedisStore: the store's contract, put together from its parts."""

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from adapter_store.catalogue import Arrival, Catalogue, Change, aliases_in, version_of
from adapter_store.errors import AdapterNotFound, DataLoss
from adapter_store.files.durable import medium_errors
from adapter_store.lease import Lease
from adapter_store.manifest import Alias, Manifest, PushOptions, Version
from adapter_store.model_spec import ModelSpec
from adapter_store.packed.form import Weights
from adapter_store.peft.source import take_adapter
from adapter_store.pushed import PushedFiles
from adapter_store.record import NameRecord, News
from adapter_store.redis_store.changes import Changes
from adapter_store.redis_store.content import Content, prepare
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.leases import Leases
from adapter_store.redis_store.metadata import Metadata
from adapter_store.redis_store.namespace import claim_namespace
from adapter_store.redis_store.orphans import find_orphans
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.read import Reader
from adapter_store.redis_store.upload import Uploader
from adapter_store.redis_store.url import RedisUrl
from adapter_store.ref import Ref, check_digest, check_identifier
from adapter_store.summary import Summary, is_deleted, lines_of, parse_lines

_CACHED_MANIFESTS = 1024
_MEMORY_BYTES = 1 << 30  # weights up to this size are pushed from memory, larger ones from a temporary file
_ALIAS_PAGE = 256
_log = logging.getLogger(__name__)


class RedisStore(Catalogue):
    """An AdapterStore (../store.py has the contract of each method)."""

    def __init__(self, url: RedisUrl, *, create: bool = True) -> None:
        """`create`: an empty namespace becomes a store. Raises NoStore, OtherFormat, StoreUnavailable;
        UnsafeStore when the server may lose what it acknowledged."""
        self._primary, self._keys = Primary(url), Keys(url.namespace)
        keys = self._keys
        self._metadata = Metadata(self._primary, keys)
        self._leases = Leases(self._primary, keys)
        self._content = Content(Reader(self._primary, keys, self._metadata))
        self._changes = Changes(self._metadata, Uploader(self._primary, keys, self._metadata), self._content)
        self._cached_manifest = functools.lru_cache(_CACHED_MANIFESTS)(self._read_manifest)
        claim_namespace(self._primary, keys, str(url), create=create)
        self._changes.sweep()

    def _put(self, source: Path, tenant: str, name: str, spec: ModelSpec, options: PushOptions) -> Version:
        with medium_errors(), tempfile.TemporaryDirectory(prefix="lorafleet-push-") as temporary:
            folder = Path(temporary) / "source"
            adapter = take_adapter(source, folder, spec, options, _MEMORY_BYTES)
            prepared = prepare(adapter, folder, _MEMORY_BYTES, options.digest, check=options.dry_run)
            arrival = Arrival(tenant, name, prepared.manifest, adapter.push, options)
            if options.dry_run:
                return arrival.version()
            record = self._changes.publish(arrival.ref, arrival.added, prepared)
        self._cached_manifest.cache_clear()
        # It may be deleted by now.
        return version_of(arrival.ref, record, arrival.manifest.digest, arrival.manifest)

    def record(self, tenant: str, name: str) -> NameRecord:
        return self._metadata.record(tenant, name).record

    def tenants(self) -> list[str]:
        return self._metadata.tenants()

    def manifest(self, digest: str) -> Manifest:
        return self._cached_manifest(check_digest(digest))

    def open(self, digest: str) -> Weights:
        return self._content.weights(check_digest(digest))

    def count(self, tenant: str) -> int:
        return self._metadata.count(check_identifier("tenant", tenant))

    def _lines(self, tenant: str, name: str | None, after: str, limit: int, deleted: bool) -> list[str]:
        return self._metadata.lines(tenant, name, after, limit, deleted)

    def aliases(self, tenant: str, name: str | None = None) -> list[Alias]:
        check_identifier("tenant", tenant)
        if name is not None:
            return [*aliases_in(tenant, name, self.record(tenant, check_identifier("name", name)))]
        return [
            alias
            for names in self._metadata.names(tenant, "", _ALIAS_PAGE)
            for each, record in self._metadata.whole([(tenant, name) for name in names])
            if record is not None
            for alias in aliases_in(*each, record)
        ]

    def damaged(self, tenant: str) -> list[str]:
        check_identifier("tenant", tenant)
        return [
            name
            for names in self._metadata.names(tenant, "", _ALIAS_PAGE)
            for (_, name), record in self._metadata.whole([(tenant, name) for name in names])
            if (record is None or not record.versions) and self._metadata.damaged(tenant, name)
        ]

    def _users_of(self, digest: str) -> list[tuple[str, str, NameRecord | None]]:
        users = self._metadata.whole(self._metadata.users(check_digest(digest)))
        return [(*name, record) for name, record in users]

    def upload(self, ref: Ref) -> str:
        [(_, record)] = self._metadata.whole([(ref.tenant, ref.name)])
        entry = record.versions.get(ref.digest or "") if record is not None else None
        return f"{self._metadata.upload(str(ref.digest))} {entry.push.files}" if entry is not None else ""

    def now(self) -> float:
        return self._leases.now()

    def hold(self, lease: Lease) -> None:
        self._leases.hold(lease)

    def let_go(self, holder: str) -> None:
        self._leases.let_go(holder)

    def leases(self) -> list[Lease]:
        return self._leases.all()

    def exchange(self, holder: str, text: str, seconds: float) -> dict[str, str]:
        return self._leases.exchange(holder, text, seconds)

    def secret(self) -> bytes:
        return self._leases.secret()

    def orphans(self) -> list[str]:
        return find_orphans(self._primary, self._keys)

    def news(self, since: int) -> News:
        return self._metadata.news(since)

    def problem(self) -> str:
        return self._primary.problem

    def _whole(self, ref: Ref) -> tuple[Version, Weights, PushedFiles]:
        """What is missing may have gone for another push."""
        tried: str | None = None
        while True:
            version = self._find(ref)
            try:
                return version, self._content.weights(version.digest), self._pushed(version)
            except DataLoss:
                if version.push.files == tried:
                    raise
                tried = version.push.files

    def _pushed(self, version: Version) -> PushedFiles:
        own = Ref(version.tenant, version.name, digest=version.digest)
        return self._content.pushed(own, version.push.files)

    def _buried(self, before: float) -> Iterator[Summary]:
        for tenant, name, digest in self._metadata.graves(before):
            try:
                lines = filter(is_deleted, lines_of(name, self.record(tenant, name)))
            except DataLoss as error:  # the others are collected all the same
                _log.error("adapter store: %s/%s is not collected: %s", tenant, name, error)
                continue
            yield from (each for each in parse_lines(tenant, lines) if each.digest == digest)

    def _remove(self, ref: Ref, change: Change) -> None:
        self._changes.remove(ref, change)
        self._cached_manifest.cache_clear()

    def _read_manifest(self, digest: str) -> Manifest:
        manifest = self._metadata.manifest(digest)
        if manifest is None:
            raise AdapterNotFound(f"adapter version {digest} was not found")
        return manifest

    def _change(self, ref: Ref, change: Change) -> NameRecord:
        return self._changes.change(ref, change)

    def _replace_damaged(
        self, ref: Ref, make: Callable[[list[str]], NameRecord], *, dry_run: bool
    ) -> NameRecord:
        return self._changes.replace_damaged(ref, make, dry_run=dry_run)

    def _change_content(self, ref: Ref, change: Change, upload: str) -> bool:
        content, _, files = upload.rpartition(" ")
        return self._changes.change_content(ref, change, content, files)
