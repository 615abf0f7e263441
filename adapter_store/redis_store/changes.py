"""Changes one name's record while others may do so, too: read, change, commit, or try again."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from adapter_store.catalogue import Change
from adapter_store.errors import AdapterNotFound, AdapterStoreError, StoreUnavailable, UploadLost
from adapter_store.files.durable import medium_errors
from adapter_store.record import NameRecord
from adapter_store.redis_store.content import Content, Prepared
from adapter_store.redis_store.index import Index
from adapter_store.redis_store.metadata import Metadata, Publication
from adapter_store.redis_store.upload import Uploader
from adapter_store.ref import Ref

_RACES = 100  # changes of one name by others that a change stands
_LINES = 1_000_000  # in listings, of one name: all
PushChange = Callable[[NameRecord, str], NameRecord]  # told which set of pushed files is its own
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Changes:
    """Each method raises what the change of the record raises, and StoreUnavailable."""

    def __init__(self, metadata: Metadata, uploader: Uploader, content: Content) -> None:
        self._metadata, self._uploader, self._content = metadata, uploader, content

    def change(self, ref: Ref, change: Change) -> NameRecord:
        """Makes a change of aliases and protections."""

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
            pushes = self._metadata.push_keys(tenant, name)  # which of them was whose is lost
            done = dry_run or (self._metadata.commit(ref, old, new, listed=lines, dropped=pushes) == "done")
            return (new,) if done else None

        return _race(attempt)[0]

    def change_content(self, ref: Ref, change: Change, content: str, files: str) -> bool:
        """The same as `change`, while what is stored of the version in `ref` is that content and those pushed
        files; else False."""

        def attempt() -> tuple[bool] | None:
            old = self._metadata.record(ref.tenant, ref.name)
            new = change(old.record)
            if old.record.versions[ref.digest or ""].push.files != files:
                return (False,)
            outcome = self._metadata.commit(ref, old, new, upload=content)
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
        change: PushChange,
        prepared: Prepared,
    ) -> NameRecord:
        """A change that adds the version in `ref`, its content and the files of the push."""
        seen = self._metadata.record(ref.tenant, ref.name).record
        change(seen, "")  # refused before gigabytes travel
        entry = seen.versions.get(prepared.manifest.digest)
        files = entry.push.files if entry is not None else ""
        same = files if files and self._content.has_pushed(ref, files, prepared.pushed) else ""
        whole = self._content.is_whole(prepared.manifest.digest)
        for need_content, files in ((not whole, same), (True, "")):  # what is there may go meanwhile
            record = self._bring(ref, change, prepared, content=need_content, files=files)
            if record is not None:
                self.sweep()  # of what this one replaces
                return record
        raise StoreUnavailable("the push took too long and was given up: push the adapter again")

    def sweep(self) -> None:
        with _whatever_happens_to_garbage():
            self._metadata.sweep()

    def _bring(
        self, ref: Ref, change: PushChange, prepared: Prepared, *, content: bool, files: str
    ) -> NameRecord | None:
        """The record with the push added; None when something is gone. `content`: it is uploaded, too;
        `files`: the set of pushed files that is there, "" when that is uploaded."""
        digest, uploads = prepared.manifest.digest, dict[str, Index]()
        try:
            with medium_errors():
                if content:
                    uploads["content"] = self._uploader.upload(digest, prepared.content)
                if not files:
                    uploads["pushed"] = self._uploader.upload(digest, prepared.pushed, owner=ref)
                    files = uploads["pushed"].upload
            publication = Publication(prepared.manifest, uploads.get("content"), uploads.get("pushed"))
            record = self._commit(ref, change, files, publication if uploads else None)
        except StoreUnavailable as error:
            if isinstance(error, UploadLost):
                self._abandon(uploads.values())
            raise  # it may be published: if it is not, it falls due by itself
        except AdapterStoreError:
            self._abandon(uploads.values())
            raise
        if record is None:
            self._abandon(uploads.values())
        return record

    def _commit(
        self, ref: Ref, change: PushChange, files: str, publication: Publication | None
    ) -> NameRecord | None:
        """The record with a version added; None when its content, its files, or an upload are gone."""

        def attempt() -> tuple[NameRecord | None] | None:
            old = self._metadata.record(ref.tenant, ref.name)
            new = change(old.record, files)
            if (publication is None or publication.pushed is None) and files not in old.record.push_files():
                return (None,)
            if new == old.record and publication is None:
                return (new,)
            outcome = self._metadata.commit(ref, old, new, "add", publication)
            return None if outcome == "stale" else (new if outcome == "done" else None,)

        return _race(attempt)[0]

    def _abandon(self, uploads: Iterable[Index]) -> None:
        with _whatever_happens_to_garbage():
            for index in uploads:
                self._metadata.abandon(index.claim)
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
