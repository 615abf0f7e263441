"""What all stores do in the same way: everything that is said about versions and aliases."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from adapter_store.errors import AdapterNotFound, DataLoss, InUse
from adapter_store.manifest import (
    AS_IT_COMES,
    Alias,
    Manifest,
    PushFacts,
    PushOptions,
    Version,
    VersionState,
)
from adapter_store.model_spec import ModelSpec
from adapter_store.packed.form import Weights
from adapter_store.pushed import PushedFiles
from adapter_store.record import AliasEntry, NameRecord
from adapter_store.ref import Ref, check_identifier
from adapter_store.summary import Summary, lines_of, parse_lines

Change = Callable[[NameRecord], NameRecord]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A push that was checked, and that no record names yet."""

    tenant: str
    name: str
    manifest: Manifest
    push: PushFacts
    options: PushOptions

    @property
    def ref(self) -> Ref:
        return Ref(self.tenant, self.name, digest=self.manifest.digest)

    def version(self) -> Version:
        """What a dry run tells of it."""
        manifest = self.manifest
        return Version(
            self.tenant, self.name, manifest.digest, manifest, self.push, time.time(), protected=False
        )

    def added(self, record: NameRecord, files: str) -> NameRecord:
        """`record` with the version, whose pushed files are `files`, and with the alias on it."""
        new = record.with_version(self.manifest, replace(self.push, files=files), time.time())
        alias, digest = self.options.alias, self.manifest.digest
        if alias is None:
            return new
        ref = Ref(self.tenant, self.name, alias=alias)
        return new.with_alias(ref, {digest: 1}, self.options.expected_generation)


class Catalogue(ABC):
    """The part of an AdapterStore (store.py has the contracts) that is the same whatever the medium is."""

    @abstractmethod
    def record(self, tenant: str, name: str) -> NameRecord: ...

    @abstractmethod
    def manifest(self, digest: str) -> Manifest: ...

    @abstractmethod
    def now(self) -> float:
        """Unix seconds by the store's own clock, which is the same for all who use it."""

    @abstractmethod
    def _put(self, source: Path, tenant: str, name: str, spec: ModelSpec, options: PushOptions) -> Version:
        """Does what put does, of names that are checked."""

    @abstractmethod
    def _lines(self, tenant: str, name: str | None, after: str, limit: int, deleted: bool) -> list[str]:
        """The same as summaries, in lines (summary.py), of names that are checked."""

    @abstractmethod
    def _change_content(self, ref: Ref, change: Change, upload: str) -> bool:
        """Does what _change does, while what is stored of the version in `ref` is that upload; else False."""

    @abstractmethod
    def _change(self, ref: Ref, change: Change) -> NameRecord:
        """Replaces the record of `ref`'s name, whatever others do to it at the same time."""

    @abstractmethod
    def _replace_damaged(
        self, ref: Ref, make: Callable[[list[str]], NameRecord], *, dry_run: bool
    ) -> NameRecord:
        """Replaces the record of `ref`'s name, which cannot be read, by what `make` makes of the digests that
        are stored for that name. The new one. Raises AdapterNotFound when the record is whole, or none."""

    @abstractmethod
    def _remove(self, ref: Ref, change: Change) -> None:
        """The same for a change that takes the version behind `ref` away; its content goes with the last."""

    @abstractmethod
    def _users_of(self, digest: str) -> list[tuple[str, str, NameRecord | None]]:
        """(tenant, name, record) of all that have the version, perhaps of some more. None: it is damaged."""

    @abstractmethod
    def _whole(self, ref: Ref) -> tuple[Version, Weights, PushedFiles]:
        """The version behind `ref` with all that is stored for it, checked. Raises AdapterNotFound,
        DataLoss."""

    @abstractmethod
    def _pushed(self, version: Version) -> PushedFiles:
        """Raises DataLoss."""

    @abstractmethod
    def _buried(self, before: float) -> Iterator[Summary]:
        """The versions of all tenants that are DELETED since `before`."""

    def _certain(self, read: Callable[[], _T]) -> _T:
        """`read`, again if what looked damaged may just have been on its way."""
        return read()

    def put(
        self, source: Path, tenant: str, name: str, spec: ModelSpec, options: PushOptions = AS_IT_COMES
    ) -> Version:
        check_identifier("tenant", tenant)
        check_identifier("name", name)
        if options.alias is not None:
            check_identifier("alias", options.alias)
        return self._put(source, tenant, name, spec, options)

    def resolve(self, ref: Ref, sticky_key: str | None = None) -> Version:
        def read() -> Version:
            record = self.record(ref.tenant, ref.name)
            return self._version(ref, record, record.active_digest_of(ref, sticky_key))

        return self._certain(read)

    def find(self, ref: Ref) -> Version:
        return self._certain(lambda: self._find(ref))

    def verify(self, ref: Ref) -> Version:
        version, weights, pushed = self._certain(lambda: self._whole(ref))
        with weights:
            pushed.check(weights)
        return version

    def export(self, ref: Ref, target: Path) -> None:
        _, weights, pushed = self._certain(lambda: self._whole(ref))
        with weights:
            pushed.write(weights, target)

    def pushed(self, ref: Ref) -> PushedFiles:
        return self._certain(lambda: self._pushed(self._find(ref)))

    def summaries(
        self,
        tenant: str,
        *,
        name: str | None = None,
        after: str = "",
        limit: int = 100,
        deleted: bool = False,
    ) -> list[Summary]:
        check_identifier("tenant", tenant)
        if name is not None:
            check_identifier("name", name)
        return parse_lines(tenant, self._lines(tenant, name, after, limit, deleted))

    def active_names(self, digest: str) -> list[tuple[str, str]]:
        return [
            (tenant, name)
            for tenant, name, record in self._users_of(digest)
            if record is not None and record.takes_requests(digest)
        ]

    def delete(self, ref: Ref) -> None:
        self._remove(ref, lambda record: record.without_version(ref))

    def withdraw(
        self,
        ref: Ref,
        state: VersionState = VersionState.DELETED,
        *,
        force: bool = False,
        end_requests: bool = False,
    ) -> Version:
        now = self.now()
        digest = ""

        def change(record: NameRecord) -> NameRecord:
            nonlocal digest
            digest = record.digest_of(ref)
            return record.withdrawn(ref, state, now, force=force, end_requests=end_requests)

        return self._version(ref, self._change(ref, change), digest)

    def activate(self, ref: Ref) -> Version:
        digest = ""

        def change(record: NameRecord) -> NameRecord:
            nonlocal digest
            digest = record.digest_of(ref)
            return record.activated(ref)

        return self._version(ref, self._change(ref, change), digest)

    def delete_damaged(self, tenant: str, name: str, *, dry_run: bool = False) -> list[Summary]:
        now = self.now()
        ref = Ref(tenant, name, alias="latest")  # Of the name: the alias is not looked at.

        def make(digests: list[str]) -> NameRecord:
            return NameRecord.of_damaged({digest: self._readable_manifest(digest) for digest in digests}, now)

        record = self._replace_damaged(ref, make, dry_run=dry_run)
        return parse_lines(tenant, lines_of(name, record))

    def collect(
        self, grace_s: float, keep: Callable[[Summary], bool], *, dry_run: bool = False
    ) -> list[Summary]:
        before, collected = self.now() - grace_s, []
        for summary in self._buried(before):
            if keep(summary):
                continue
            ref = Ref(summary.tenant, summary.name, digest=summary.digest)
            try:
                if not dry_run:
                    self._remove(ref, partial(NameRecord.buried, ref=ref, before=before))
            except (AdapterNotFound, InUse):
                continue  # pushed again, an alias of a migration holds it, or somebody else was faster
            collected.append(summary)
        return collected

    def set_alias(
        self, tenant: str, name: str, alias: str, digest: str, *, expected_generation: int | None = None
    ) -> Alias:
        Ref(tenant, name, digest=digest)
        return self.split_alias(tenant, name, alias, {digest: 1}, expected_generation=expected_generation)

    def split_alias(
        self,
        tenant: str,
        name: str,
        alias: str,
        targets: Mapping[str, int],
        *,
        expected_generation: int | None = None,
    ) -> Alias:
        ref = Ref(tenant, name, alias=check_identifier("alias", alias))
        record = self._change(ref, lambda record: record.with_alias(ref, targets, expected_generation))
        return _alias(ref, record.aliases[alias])

    def delete_alias(self, tenant: str, name: str, alias: str) -> None:
        ref = Ref(tenant, name, alias=alias)
        self._change(ref, lambda record: record.without_alias(alias, ref))

    def set_protected(self, tenant: str, name: str, digest: str, protected: bool) -> Version:
        ref = Ref(tenant, name, digest=digest)
        record = self._change(ref, lambda record: record.with_protection(ref, protected))
        return self._version(ref, record, digest)

    def set_quarantined(
        self, tenant: str, name: str, digest: str, quarantined: bool, *, upload: str | None = None
    ) -> bool:
        ref = Ref(tenant, name, digest=digest)

        def change(record: NameRecord) -> NameRecord:
            return record.with_quarantine(ref, quarantined)

        if upload is not None:
            return self._change_content(ref, change, upload)
        self._change(ref, change)
        return True

    def _find(self, ref: Ref) -> Version:
        record = self.record(ref.tenant, ref.name)
        return self._version(ref, record, record.digest_of(ref))

    def take_over(self, tenant: str, name: str, record: NameRecord) -> None:
        ref = Ref(tenant, name, alias="latest")  # Of the name: the alias is not looked at.
        self._change(ref, lambda old: old.taking_over(record))

    def _readable_manifest(self, digest: str) -> Manifest | None:
        try:
            return self.manifest(digest)
        except (AdapterNotFound, DataLoss):
            return None

    def _version(self, ref: Ref, record: NameRecord, digest: str) -> Version:
        return version_of(ref, record, digest, self.manifest(digest))


def version_of(ref: Ref, record: NameRecord, digest: str, manifest: Manifest) -> Version:
    """What the record of `ref`'s name says of one of its versions."""
    entry = record.versions[digest]
    return Version(
        ref.tenant,
        ref.name,
        digest,
        manifest,
        entry.push,
        entry.created_at,
        entry.protected,
        entry.state,
        entry.quarantined,
    )


def aliases_in(tenant: str, name: str, record: NameRecord) -> Iterator[Alias]:
    """Sorted. Those that were deleted are not told."""
    for alias, entry in sorted(record.aliases.items()):
        if entry.digest is not None:
            yield _alias(Ref(tenant, name, alias=alias), entry)


def _alias(ref: Ref, entry: AliasEntry) -> Alias:
    return Alias(
        ref.tenant, ref.name, str(ref.alias), str(entry.digest), entry.generation, dict(entry.weights)
    )
