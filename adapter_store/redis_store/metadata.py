"""Records, manifests and indexes: all that is small, and changes in one script."""

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from adapter_store.errors import DataLoss, UploadLost
from adapter_store.formats import FORMAT
from adapter_store.manifest import Manifest, VersionState
from adapter_store.record import NameRecord, News, naming
from adapter_store.redis_store import scripts
from adapter_store.redis_store.index import Claim, Index
from adapter_store.redis_store.keys import Keys, seal, unseal
from adapter_store.redis_store.primary import Command, Primary, Provided
from adapter_store.redis_store.scan import scan
from adapter_store.ref import Ref
from adapter_store.summary import after_line, is_shown, lines_of

OPERATION_SECONDS = 600  # far longer than anybody repeats a change
CLAIM_SECONDS = 600  # to make the chunks permanent and publish them
_REMEMBERED_CHANGES = 10_000  # names: a scheduler that knows an older state reads everything again
_SWEEP_CLAIMS = 16
_PAGE = 256
_LINES = 1000
_UNLINK_KEYS = 512
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Read:
    """A record, and the stored bytes that it was read from."""

    record: NameRecord
    raw: bytes


@dataclass(frozen=True, slots=True)
class Publication:
    """Uploads that are to appear with a change of the record. None: that is stored already. The record names
    the pushed files by `pushed.upload`."""

    manifest: Manifest
    content: Index | None
    pushed: Index | None


Name = tuple[str, str]  # tenant, name
Outcome = Literal["done", "stale", "lost"]


class Metadata:
    def __init__(self, primary: Primary, keys: Keys) -> None:
        self._primary, self._keys = primary, keys

    # ---- reading

    def record(self, tenant: str, name: str) -> Read:
        """An unknown name has the empty record. Raises DataLoss."""
        key = self._keys.record(tenant, name)
        [raw] = self._primary.run(("GET", key))
        with naming(tenant, name):
            return _read(key, raw)

    def whole(self, names: Sequence[Name]) -> list[tuple[Name, NameRecord | None]]:
        """Many at once. None for a damaged one, which is logged: it hides no other."""
        if not names:
            return []
        keys = [self._keys.record(*name) for name in names]
        [values] = self._primary.run(("MGET", *keys))
        return [(name, _read_if_whole(key, raw)) for name, key, raw in zip(names, keys, values, strict=True)]

    def damaged(self, tenant: str, name: str) -> Read | None:
        """A record that cannot be read, or is lost though its name is listed, as the empty one; else None."""
        key = self._keys.record(tenant, name)
        listed, raw = self._primary.run(("ZSCORE", self._keys.names(tenant), f"{name}@"), ("GET", key))
        is_lost = raw is None and listed is not None
        return Read(NameRecord(), raw or b"") if is_lost or _read_if_whole(key, raw) is None else None

    def digests(self, tenant: str, name: str) -> list[str]:
        """The digests of all content that a name has, sorted. Walks all keys of the database."""
        prefix = self._keys.users("")
        digests = sorted({key.removeprefix(prefix) for key in scan(self._primary, f"{prefix}*")})
        asked = [("SISMEMBER", self._keys.users(digest), f"{tenant}/{name}") for digest in digests]
        found = zip(digests, self._primary.run(*asked) if asked else (), strict=True)
        return [digest for digest, has in found if has]

    def users(self, digest: str) -> list[Name]:
        """The users of a version, sorted."""
        [members] = self._primary.run(("SMEMBERS", self._keys.users(digest)))
        return [(tenant, name) for tenant, _, name in sorted(m.decode().partition("/") for m in members)]

    def names(self, tenant: str, first: str, page: int) -> Iterator[list[str]]:
        """Pages of at most `page` names in the order of "name@digest", those from "first" on."""
        page = min(page, _PAGE)
        start = f"[{first}" if first else "-"
        while True:
            command = ("ZRANGEBYLEX", self._keys.names(tenant), start, "+", "LIMIT", 0, page)
            [members] = self._primary.run(command)
            if members:
                yield [member.decode().removesuffix("@") for member in members]
            if len(members) < page:
                return
            start = f"({members[-1].decode()}"

    def tenants(self) -> list[str]:
        """Walks all keys of the database."""
        prefix = self._keys.names("")
        return sorted({key.removeprefix(prefix) for key in scan(self._primary, f"{prefix}*")})

    def manifest(self, digest: str) -> Manifest | None:
        """Raises DataLoss."""
        [raw] = self._primary.run(("HGET", self._keys.blob(digest), "manifest"))
        return None if raw is None else self._manifest(digest, raw)

    def index(self, digest: str) -> tuple[Manifest, Index] | None:
        """Raises DataLoss."""
        key = self._keys.blob(digest)
        [(manifest, index)] = self._primary.run(("HMGET", key, "manifest", "index"))
        if manifest is None or index is None:
            return None
        found = Index.from_json(unseal(f"{key} index", index))
        return self._manifest(digest, manifest), found

    def push(self, ref: Ref, files: str) -> Index | None:
        """Raises DataLoss."""
        key = self._keys.push(ref.tenant, ref.name, files)
        [raw] = self._primary.run(("HGET", key, "index"))
        return None if raw is None else Index.from_json(unseal(key, raw))

    def push_keys(self, tenant: str, name: str) -> list[str]:
        """The keys of all sets of files that a name has. Walks all keys of the database."""
        return sorted(set(scan(self._primary, f"{self._keys.push(tenant, name, '')}*")))

    def upload(self, digest: str) -> str:
        """What is stored as its content, "" for nothing."""
        [claim] = self._primary.run(("HGET", self._keys.blob(digest), "claim"))
        return claim.decode() if claim else ""

    def lines(self, tenant: str, name: str | None, after: str, limit: int, deleted: bool) -> list[str]:
        """Lines for listings (../summary.py): the first `limit` whose keys are greater than `after`."""
        key, found = self._keys.lines(tenant), list[str]()
        start = after_line(after) if after else ""
        if name is not None:
            start = max(start, f"{name}@")
        first = f"[{start}" if start else "-"  # no line is equal to it
        last = "+" if name is None else f"({name}A"  # "A" comes after "@"
        while len(found) < limit:
            size = min(limit, _LINES)
            [members] = self._primary.run(("ZRANGEBYLEX", key, first, last, "LIMIT", 0, size))
            lines = [member.decode() for member in members]
            found += [line for line in lines if is_shown(line, deleted)]
            if len(lines) < size:
                break
            first = f"({lines[-1]}"
        return found[:limit]

    def count(self, tenant: str) -> int:
        """Lines of listings."""
        [number] = self._primary.run(("ZCARD", self._keys.lines(tenant)))
        return int(number)

    def graves(self, before: float) -> list[tuple[str, str, str]]:
        """(tenant, name, digest) of what is DELETED since `before`."""
        [members] = self._primary.run(("ZRANGEBYSCORE", self._keys.graves, "-inf", repr(before)))
        return [_named(member.decode()) for member in members]

    def news(self, since: int) -> News:
        keys = (self._keys.changes, self._keys.changed, self._keys.first_change)
        [reply] = self._primary.run(("EVAL", scripts.NEWS, 3, *keys, since, _REMEMBERED_CHANGES))
        number, kind, *members = (part.decode() for part in reply)
        if kind == "all":
            return News(int(number), None)
        return News(
            int(number), frozenset((tenant, name) for tenant, _, name in (m.partition("/") for m in members))
        )

    # ---- changing

    def commit(
        self,
        ref: Ref,  # the record's; its digest says which version is added or removed
        old: Read,
        new: NameRecord,
        kind: Literal["add", "remove", "keep"] = "keep",
        publication: Publication | None = None,
        upload: str = "",  # what must be stored as its content, if named
        listed: Sequence[str] = (),  # lines of the old record, which do not follow from `old`
        dropped: Sequence[str] = (),  # keys of pushed files, which do not follow from `old`, either
    ) -> Outcome:
        """One step for every reader. "stale": somebody was faster; "lost": its content is gone."""
        record, blob = self._keys.record(ref.tenant, ref.name), self._keys.blob(ref.digest or "")
        keys = [record, self._keys.names(ref.tenant), self._keys.changes]
        operation = self._keys.operation(uuid.uuid4().hex)
        keys += [operation, blob, self._keys.users(ref.digest or "")]
        claim, manifest, index = upload.encode(), b"", b""
        push, push_claim, push_index = record, b"", b""
        uploads = list[tuple[Claim, str]]()
        if publication is not None and (content := publication.content) is not None:
            claim = str(content.claim).encode()
            manifest = seal(f"{blob} manifest", publication.manifest.to_json())
            index = seal(f"{blob} index", content.to_json())
            uploads.append((content.claim, blob))
        if publication is not None and (pushed := publication.pushed) is not None:
            push = self._keys.push(ref.tenant, ref.name, pushed.upload)
            push_claim, push_index = str(pushed.claim).encode(), seal(push, pushed.to_json())
            uploads.append((pushed.claim, push))
        arguments = [old.raw, seal(record, new.to_json()) if new.versions else b""]
        arguments += [f"{ref.name}@".encode(), f"{ref.tenant}/{ref.name}".encode(), kind.encode()]
        arguments += [claim, manifest, index]
        keys += [self._keys.pending, self._keys.lines(ref.tenant), self._keys.graves]
        keys += [self._keys.changed, self._keys.first_change, self._keys.format, push]
        lost = old.record.push_files() - new.push_files()
        keys += [*dropped, *(self._keys.push(ref.tenant, ref.name, files) for files in sorted(lost))]
        before = {*lines_of(ref.name, old.record), *listed}
        changes = _listing_changes(ref, old.record, new, before)
        command: Command = (
            "EVAL",
            scripts.COMMIT,
            len(keys),
            *keys,
            *arguments,
            OPERATION_SECONDS,
            _REMEMBERED_CHANGES,
            FORMAT,
            push_claim,
            push_index,
            *changes,
        )
        provided = self._chunks_stay(uploads, operation) if uploads else None
        [outcome] = self._primary.run(
            command, durable=True, changed=lambda replies: replies == [b"done"], provided=provided
        )
        result: Outcome = outcome.decode()
        return result

    def _chunks_stay(self, uploads: Sequence[tuple[Claim, str]], operation: str) -> Provided:
        """The chunks of uploads do not expire any more, and all of them are there. Raises UploadLost.

        On the connection of the change that publishes them: a server that was restarted in between, and may
        have lost them, ends that. And the file has them before it has the change, so one wait is for both.
        Claims are made again, as a restart may have lost them, and chunks that stay need one. A primary may
        even become a replica and a primary again without closing the connection, and have another's data
        then: what is left under the operation behind the chunks tells the change that these are the same.
        """
        keys = [
            [self._keys.chunk(claim.digest, claim.upload, number) for number in range(claim.num_chunks)]
            for claim, _ in uploads
        ]

        def check(replies: Sequence[Any]) -> None:
            if [*replies[-1 - len(keys) : -1]] != [*map(len, keys)]:
                raise UploadLost("the store's Redis lost a part of the upload: push the adapter again")

        persist = [("PERSIST", key) for chunks in keys for key in chunks]
        seen = ("SET", operation, "0", "NX", "EX", OPERATION_SECONDS)
        claims = [self._claiming(claim, home) for claim, home in uploads]
        there = [("EXISTS", *chunks) for chunks in keys]
        return Provided((*claims, *persist, *there, seen), check)

    def claim(self, claim: Claim, owner: Ref | None = None) -> None:
        """Claims the keys of an upload that is not published: of content, or of the files of a push by that
        name."""
        home = self._keys.blob(claim.digest)
        if owner is not None:
            home = self._keys.push(owner.tenant, owner.name, claim.upload)
        self._primary.run(self._claiming(claim, home))

    def _claiming(self, claim: Claim, home: str) -> Command:
        """`home`: the key that has the claim once it is published."""
        keys = (self._keys.pending, home, self._keys.doomed)
        return ("EVAL", scripts.CLAIM, len(keys), *keys, str(claim), CLAIM_SECONDS)

    def abandon(self, claim: Claim) -> None:
        """Unless it is published."""
        self._primary.run(("ZADD", self._keys.pending, "XX", 0, str(claim)))

    def sweep(self) -> None:
        """Removes the chunks of dead uploads and of deleted versions."""
        keys = (self._keys.pending, self._keys.doomed)
        [claims] = self._primary.run(("EVAL", scripts.DOOM, 2, *keys, _SWEEP_CLAIMS))
        for text in claims:
            claim = Claim.parse(text.decode())
            chunks = [
                self._keys.chunk(claim.digest, claim.upload, number) for number in range(claim.num_chunks)
            ]
            for start in range(0, len(chunks), _UNLINK_KEYS):
                self._primary.run(("UNLINK", *chunks[start : start + _UNLINK_KEYS]))
            self._primary.run(("SREM", self._keys.doomed, text))

    def _manifest(self, digest: str, raw: bytes) -> Manifest:
        return Manifest.from_json(unseal(f"{self._keys.blob(digest)} manifest", raw))


def _read(key: str, raw: bytes | None) -> Read:
    return Read(NameRecord(), b"") if raw is None else Read(NameRecord.from_json(unseal(key, raw)), raw)


def _read_if_whole(key: str, raw: bytes | None) -> NameRecord | None:
    try:
        return _read(key, raw).record
    except DataLoss as error:
        _log.error("adapter store: what is said under %s is damaged: %s", key, error)
        return None


def _listing_changes(ref: Ref, old: NameRecord, new: NameRecord, before: set[str]) -> list[str | int]:
    """COMMIT's arguments from the 14th on. `before`: the old record's lines."""
    after = set(lines_of(ref.name, new))
    buried, burying = _graves(ref, old), _graves(ref, new)
    gone = [member for member in buried if member not in burying]
    come = [(repr(at), member) for member, at in burying.items() if buried.get(member) != at]
    counts = [len(before - after), len(after - before), len(gone), len(come)]
    added = [part for pair in come for part in pair]
    return [*counts, *sorted(before - after), *sorted(after - before), *gone, *added]


def _graves(ref: Ref, record: NameRecord) -> dict[str, float]:
    return {
        f"{ref.tenant}/{ref.name}@{digest}": entry.left_at
        for digest, entry in record.versions.items()
        if entry.state is VersionState.DELETED
    }


def _named(member: str) -> tuple[str, str, str]:
    tenant, _, rest = member.partition("/")
    name, _, digest = rest.partition("@")
    return tenant, name, digest
