"""Changes one name's record while others may do so, too: read, change, commit, or try again."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from adapter_store.catalogue import Change
from adapter_store.errors import AdapterNotFound, AdapterStoreError, StoreUnavailable, UploadLost
from adapter_store.files.durable import medium_errors
from adapter_store.manifest import Manifest
from adapter_store.record import NameRecord
from adapter_store.redis_store.content import Content
from adapter_store.redis_store.index import Claim
from adapter_store.redis_store.metadata import Metadata, Publication
from adapter_store.redis_store.upload import Sendable, Uploader
from adapter_store.ref import Ref

_RACES = 100  # changes of one name by others that a change stands
_LINES = 1_000_000  # in listings, of one name: all
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Changes:
    """Each method raises what the change of the record raises, and StoreUnavailable."""

    def __init__(self, metadata: Metadata, uploader: Uploader, content: Content) -> None:
        self._metadata, self._uploader, self._content = metadata, uploader, content

    def change(self, ref: Ref, change: Change) -> NameRecord:
        """Of aliases and protections."""

        def attempt() -> NameRecord | None:
            old = self._metadata.record(ref.tenant, ref.name)
            new = change(old.record)
            done = new == old.record or self._metadata.commit(ref, old, new) == "done"
            return new if done else None

        return _race(attempt)

    def replace_damaged(
        self, ref: Ref, make: Callable[[list[str]], NameRecord], *, dry_run: bool
    ) -> NameRecord:
        """A record that cannot be read by what `make` makes of the digests that its name has. Raises
        AdapterNotFound when it can be, or there is none."""
        tenant, name = ref.tenant, ref.name

        def attempt() -> tuple[NameRecord] | None:
            old = self._metadata.damaged(tenant, name)
            if old is None:
                raise AdapterNotFound(f"{tenant}/{name} has no damaged record")
            new = make(self._metadata.digests(tenant, name))
            lines = self._metadata.lines(tenant, name, "", _LINES, deleted=True)
            done = dry_run or self._metadata.commit(ref, old, new, listed=lines) == "done"
            return (new,) if done else None

        return _race(attempt)[0]

    def change_content(self, ref: Ref, change: Change, upload: str) -> bool:
        """As `change`, while what is stored of the version in `ref` is that upload; else False."""

        def attempt() -> tuple[bool] | None:
            old = self._metadata.record(ref.tenant, ref.name)
            outcome = self._metadata.commit(ref, old, change(old.record), upload=upload)
            return None if outcome == "stale" else (outcome == "done",)

        return _race(attempt)[0]

    def remove(self, ref: Ref, change: Change) -> None:
        """A change that takes the version behind `ref` away."""

        def attempt() -> bool:
            old = self._metadata.record(ref.tenant, ref.name)
            version = Ref(ref.tenant, ref.name, digest=old.record.digest_of(ref))
            new = change(old.record)
            return self._metadata.commit(version, old, new, "remove") == "done"

        _race(attempt)
        self.sweep()

    def publish(
        self,
        ref: Ref,  # with the digest
        change: Change,
        manifest: Manifest,
        files: Mapping[str, Sendable],
    ) -> NameRecord:
        """A change that adds the version in `ref`, and its content."""
        change(self._metadata.record(ref.tenant, ref.name).record)  # refused before gigabytes travel
        record = self._commit(ref, change, None) if self._content.is_whole(manifest.digest) else None
        if record is None:
            record = self._upload(ref, change, manifest, files)
            self.sweep()  # of the content that this one replaces, if it was damaged
        return record

    def sweep(self) -> None:
        with _whatever_happens_to_garbage():
            self._metadata.sweep()

    def _upload(
        self, ref: Ref, change: Change, manifest: Manifest, files: Mapping[str, Sendable]
    ) -> NameRecord:
        with medium_errors():
            index = self._uploader.upload(manifest.digest, files)
        try:
            record = self._commit(ref, change, Publication(manifest, index))
        except UploadLost:
            self._abandon(index.claim)
            raise
        except StoreUnavailable:
            raise  # it may be published: if it is not, it falls due by itself
        except AdapterStoreError:
            self._abandon(index.claim)
            raise
        if record is None:
            raise StoreUnavailable("the push took too long and was given up: push the adapter again")
        return record

    def _commit(self, ref: Ref, change: Change, publication: Publication | None) -> NameRecord | None:
        """The record with a version added; None when the version's content, or the upload, is gone."""

        def attempt() -> tuple[NameRecord | None] | None:
            old = self._metadata.record(ref.tenant, ref.name)
            new = change(old.record)
            if new == old.record and publication is None:
                return (new,)
            outcome = self._metadata.commit(ref, old, new, "add", publication)
            return None if outcome == "stale" else (new if outcome == "done" else None,)

        return _race(attempt)[0]

    def _abandon(self, claim: Claim) -> None:
        with _whatever_happens_to_garbage():
            self._metadata.abandon(claim)
            self._metadata.sweep()


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
