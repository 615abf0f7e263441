"""Copies one adapter store into another, version by version: each arrives whole or not at all."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from adapter_store import (
    AdapterStoreError,
    DataLoss,
    ModelSpec,
    NameRecord,
    Publisher,
    PushOptions,
    Ref,
    StoreUnavailable,
    Summary,
)
from adapter_store.formats import FORMAT
from adapter_store.old_stores.old_store import old_digest
from adapter_store.old_stores.open import MigrationSource
from adapter_store.record import AliasEntry

PAGE = 1000
_DAMAGED = "what the source says of its versions is damaged"


@dataclass(frozen=True, slots=True)
class Migrated:
    """Versions by what became of them; `failed` says why, by "tenant/name@digest", or by "tenant/name" where
    the source's record of all of them is damaged. `renamed`: the digest that a version has in the target,
    where that is another one, by "tenant/name@digest" too."""

    copied: int = 0
    present: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


def migrate(
    source: MigrationSource,
    target: Publisher,
    spec: ModelSpec,
    *,
    source_format: int = FORMAT,
    tenants: Sequence[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Migrated:
    """All versions but the deleted ones, of all tenants when none is named, then what is said about them:
    states, protections, times, aliases with their generations.

    What the target has is not copied again, so it can be ended and started anew, unless the files of a push
    were replaced meanwhile by another one of the same content. A version that cannot be
    copied (it is damaged, or made for another base) is told in the result; the others go on. Digests of
    format 2 are others: its versions are stored again, and checked against both. Raises StoreUnavailable.
    """
    asked = tenants or source.tenants()
    damaged = [f"{tenant}/{name}" for tenant in asked for name in source.damaged(tenant)]
    found = (each for tenant in asked for each in _versions(source, tenant))
    versions = [each for each in found if f"{each.tenant}/{each.name}" not in damaged]
    copied, present, failed, renamed = 0, 0, dict.fromkeys(damaged, _DAMAGED), dict[str, str]()
    for number, version in enumerate(versions):
        on_progress(number, len(versions))
        ref = Ref(version.tenant, version.name, digest=version.digest)
        there = target.record(ref.tenant, ref.name).versions
        if version.digest in there and _has_files(source, target, ref):
            present += 1
            continue
        try:
            digest = version.digest if dry_run else _copy(source, target, ref, spec, source_format)
        except StoreUnavailable:
            raise
        except AdapterStoreError as error:
            failed[str(ref)] = str(error)
            continue
        if digest != version.digest:
            renamed[str(ref)] = digest
        present, copied = (present + 1, copied) if digest in there else (present, copied + 1)
    on_progress(len(versions), len(versions))
    if not dry_run:
        for tenant, name in sorted({(version.tenant, version.name) for version in versions}):
            target.take_over(tenant, name, _renamed(tenant, name, source.record(tenant, name), renamed))
    return Migrated(copied, present, failed, renamed)


def _versions(store: MigrationSource, tenant: str) -> Iterator[Summary]:
    after = ""
    while page := store.summaries(tenant, after=after, limit=PAGE):
        yield from page
        after = page[-1].key


def _has_files(source: MigrationSource, target: Publisher, ref: Ref) -> bool:
    """Whether the target has the files of the name's last push into the source, or nobody can copy them."""
    try:
        pushed = source.pushed(ref)
    except DataLoss:
        return True
    try:
        return pushed is None or pushed == target.pushed(ref)
    except DataLoss:
        return False


def _copy(source: MigrationSource, target: Publisher, ref: Ref, spec: ModelSpec, source_format: int) -> str:
    """Copies by way of the pushed files. The digest there: in stores of one format the same content has the
    same."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-migrate-") as folder:
        files = Path(folder) / "adapter"
        source.export(ref, files)
        before = target.record(ref.tenant, ref.name).versions
        entry = source.record(ref.tenant, ref.name).versions.get(str(ref.digest))
        told = entry.push.warnings if entry is not None else ()
        options = PushOptions(alias=None, warnings=told, digest=ref.digest)
        copy = target.put(files, ref.tenant, ref.name, spec, options)
        if _digest_as_of(source_format, target, copy.digest) != ref.digest:
            if copy.digest not in before:
                target.delete(Ref(ref.tenant, ref.name, digest=copy.digest))
            raise DataLoss(f"its files make version {copy.digest} today: push the adapter again")
        return copy.digest


def _digest_as_of(source_format: int, target: Publisher, digest: str) -> str:
    """What the content that `target` has as `digest` is called in a store of that format."""
    if source_format > 2:
        return digest
    with target.open(digest) as weights:
        return old_digest(weights, source_format)


def _renamed(tenant: str, name: str, record: NameRecord, renamed: Mapping[str, str]) -> NameRecord:
    """The record with the digests that the versions have in the target."""

    def new(digest: str) -> str:
        return renamed.get(f"{tenant}/{name}@{digest}", digest)

    def alias(entry: AliasEntry) -> AliasEntry:
        weights = {new(digest): weight for digest, weight in entry.weights.items()}
        return replace(entry, digest=None if entry.digest is None else new(entry.digest), weights=weights)

    return NameRecord(
        {new(digest): entry for digest, entry in record.versions.items()},
        {name: alias(entry) for name, entry in record.aliases.items()},
    )
