"""Copies one adapter store into another, version by version: each arrives whole or not at all."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adapter_store import AdapterStore, AdapterStoreError, DataLoss, ModelSpec, Ref, StoreUnavailable, Summary

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Migrated:
    """Versions by what became of them; `failed` says why, by "tenant/name@digest"."""

    copied: int = 0
    present: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)


def migrate(
    source: AdapterStore,
    target: AdapterStore,
    spec: ModelSpec,
    *,
    tenants: Sequence[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Migrated:
    """All versions but the deleted ones, of all tenants when none is named, then what is said about them:
    states, protections, times, aliases with their generations.

    What the target has is not copied again, so it can be ended and started anew. A version that cannot be
    copied (it is damaged, or made for another base) is told in the result; the others go on. Raises
    StoreUnavailable.
    """
    versions = [each for tenant in tenants or source.tenants() for each in _versions(source, tenant)]
    copied, present, failed = 0, 0, dict[str, str]()
    for number, version in enumerate(versions):
        on_progress(number, len(versions))
        ref = Ref(version.tenant, version.name, digest=version.digest)
        if version.digest in target.record(ref.tenant, ref.name).versions:
            present += 1
        else:
            try:
                if not dry_run:
                    _copy(source, target, ref, spec)
                copied += 1
            except StoreUnavailable:
                raise
            except AdapterStoreError as error:
                failed[str(ref)] = str(error)
    on_progress(len(versions), len(versions))
    if not dry_run:
        for tenant, name in sorted({(version.tenant, version.name) for version in versions}):
            target.take_over(tenant, name, source.record(tenant, name))
    return Migrated(copied, present, failed)


def _versions(store: AdapterStore, tenant: str) -> Iterator[Summary]:
    after = ""
    while page := store.summaries(tenant, after=after, limit=PAGE):
        yield from page
        after = page[-1].key


def _copy(source: AdapterStore, target: AdapterStore, ref: Ref, spec: ModelSpec) -> None:
    """By way of the files of the first push: the same content has the same digest everywhere."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-migrate-") as folder:
        files = Path(folder) / "adapter"
        source.export(ref, files)
        before = target.record(ref.tenant, ref.name).versions
        copy = target.put(files, ref.tenant, ref.name, spec, alias=None)
        if copy.digest != ref.digest:
            if copy.digest not in before:
                target.delete(Ref(ref.tenant, ref.name, digest=copy.digest))
            raise DataLoss(f"its files make version {copy.digest} today: push the adapter again")
