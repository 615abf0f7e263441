"""The media behind a store, with what a test may do to each behind the store's back."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from adapter_store import AdapterNotFound, AdapterStore, DiskStore, Ref, Version
from adapter_store.redis_store.index import Index
from adapter_store.redis_store.keys import Keys, unseal
from adapter_store.redis_store.store import RedisStore
from adapter_store.redis_store.url import RedisUrl
from tests.support.stores.redis_server import RedisServer

Change = Callable[[bytes], bytes | None]  # None: gone


def at(version: Version) -> Ref:
    return Ref(version.tenant, version.name, digest=version.digest)


def collected(store: AdapterStore, **options: bool) -> list[str]:
    """Without a grace, and nobody uses anything."""
    return [summary.digest for summary in store.collect(0, lambda _: False, **options)]


def versions_in(
    store: AdapterStore, tenant: str, *, name: str | None = None, after: str = "", limit: int = 100
) -> list[Version]:
    """The versions of a listing, whole; what goes while it is read is left out."""
    found = []
    for each in store.summaries(tenant, name=name, after=after, limit=limit):
        with suppress(AdapterNotFound):
            found.append(store.find(Ref(each.tenant, each.name, digest=each.digest)))
    return found


class Medium(Protocol):
    def open(self) -> AdapterStore:
        """As a process that starts now would."""
        ...

    def change_packed(self, digest: str, change: Change) -> None: ...

    def change_pushed(self, version: Version, name: str, change: Change) -> None:
        """A pushed file; of the weights, what they are made from again."""
        ...

    def swap_pushed(self, one: Version, other: Version) -> None:
        """The pushed files of two versions, each in the place of the other."""
        ...

    def change_manifest(self, digest: str, change: Change) -> None: ...

    def change_record(self, tenant: str, name: str, change: Change) -> None: ...

    def values(self, version: Version) -> list[Callable[[Change], None]]:
        """To change each stored value that the version is made of."""
        ...

    def digests(self) -> set[str]:
        """Of all content that is there, named by a record or not."""
        ...

    def leftovers(self) -> list[str]:
        """What is there beyond what is known of the last changes."""
        ...


@dataclass(frozen=True)
class DiskMedium:
    root: Path

    def open(self) -> DiskStore:
        return DiskStore(self.root)

    def change_packed(self, digest: str, change: Change) -> None:
        _change_file(self._blob(digest) / "packed.safetensors", change)

    def change_pushed(self, version: Version, name: str, change: Change) -> None:
        folder = self._push(version)
        recipe = name == "adapter_model.safetensors"
        _change_file(folder / "recipe" if recipe else folder / "files" / name, change)

    def swap_pushed(self, one: Version, other: Version) -> None:
        first, second = self._push(one), self._push(other)
        first.rename(self.root / "between")
        second.rename(first)
        (self.root / "between").rename(second)

    def change_manifest(self, digest: str, change: Change) -> None:
        _change_file(self._blob(digest) / "manifest.json", change)

    def change_record(self, tenant: str, name: str, change: Change) -> None:
        _change_file(self.root / "names" / tenant / f"{name}.json", change)

    def values(self, version: Version) -> list[Callable[[Change], None]]:
        folders = (self._blob(version.digest), self._push(version))
        files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        record = partial(self.change_record, version.tenant, version.name)
        return [*(partial(_change_file, path) for path in files), record]

    def digests(self) -> set[str]:
        return {f"sha256:{path.name}" for path in (self.root / "blobs").iterdir()}

    def leftovers(self) -> list[str]:
        files = [str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()]
        return sorted(set(files) - {"lock", "changes", "format-4", "secret"})

    def _push(self, version: Version) -> Path:
        [folder] = (self.root / "pushes").glob(f"{version.tenant}+{version.name}+{version.push.files}")
        return folder

    def _blob(self, digest: str) -> Path:
        return self.root / "blobs" / digest.removeprefix("sha256:")


@dataclass(frozen=True)
class RedisMedium:
    """One namespace of a server."""

    server: RedisServer
    namespace: str

    @property
    def keys(self) -> Keys:
        return Keys(self.namespace)

    def open(self) -> RedisStore:
        return RedisStore(RedisUrl.parse(f"{self.server.url}?namespace={self.namespace}"))

    def change_packed(self, digest: str, change: Change) -> None:
        self._change_file(self.index(digest), "packed.safetensors", change)

    def change_pushed(self, version: Version, name: str, change: Change) -> None:
        index = self.pushed_index(self._push(version))
        stored = "recipe" if name == "adapter_model.safetensors" else f"source/{name}"
        self._change_file(index, stored, change)

    def swap_pushed(self, one: Version, other: Version) -> None:
        first, second = self._push(one), self._push(other)
        with self.server.client() as client:
            client.rename(first, self.keys.operation("between"))
            client.rename(second, first)
            client.rename(self.keys.operation("between"), second)

    def change_manifest(self, digest: str, change: Change) -> None:
        self._change_field(self.keys.blob(digest), "manifest", change)

    def change_record(self, tenant: str, name: str, change: Change) -> None:
        self._change_key(self.keys.record(tenant, name), change)

    def values(self, version: Version) -> list[Callable[[Change], None]]:
        claims = [self.index(version.digest).claim, self.pushed_index(self._push(version)).claim]
        chunks = [
            self.keys.chunk(claim.digest, claim.upload, n)
            for claim in claims
            for n in range(claim.num_chunks)
        ]
        blob, push = self.keys.blob(version.digest), self._push(version)
        fields = [
            partial(self._change_field, *field)
            for field in ((blob, "manifest"), (blob, "index"), (push, "index"))
        ]
        record = partial(self.change_record, version.tenant, version.name)
        return [*(partial(self._change_key, key) for key in chunks), *fields, record]

    def index(self, digest: str) -> Index:
        key = self.keys.blob(digest)
        with self.server.client() as client:
            return Index.from_json(unseal(f"{key} index", client.hget(key, "index")))

    def pushed_index(self, key: str) -> Index:
        with self.server.client() as client:
            return Index.from_json(unseal(key, client.hget(key, "index")))

    def push_keys(self) -> list[str]:
        return [key for key in self.all_keys() if key.startswith(self.keys.pushes)]

    def _push(self, version: Version) -> str:
        return self.keys.push(version.tenant, version.name, version.push.files)

    def digests(self) -> set[str]:
        prefix = self.keys.blob("")
        return {key.removeprefix(prefix) for key in self.all_keys() if key.startswith(prefix)}

    def leftovers(self) -> list[str]:
        operations = self.keys.operation("")
        keys = self.keys
        counters = {keys.changes, keys.first_change, keys.changed, keys.format}
        return [key for key in self.all_keys() if key not in counters and not key.startswith(operations)]

    def all_keys(self) -> list[str]:
        with self.server.client() as client:
            return sorted(key.decode() for key in client.scan_iter(f"{self.namespace}:*", count=1000))

    def _change_file(self, index: Index, name: str, change: Change) -> None:
        """Its first chunk: the files of the tests have only one."""
        number = next(index.numbers(index.file(name)))
        self._change_key(self.keys.chunk(index.digest, index.upload, number), change)

    def _change_field(self, key: str, field: str, change: Change) -> None:
        with self.server.client() as client:
            changed = change(client.hget(key, field))
            client.hset(key, field, changed) if changed is not None else client.hdel(key, field)

    def _change_key(self, key: str, change: Change) -> None:
        with self.server.client() as client:
            changed = change(client.get(key))
            client.set(key, changed) if changed is not None else client.delete(key)


def _change_file(path: Path, change: Change) -> None:
    changed = change(path.read_bytes())
    path.write_bytes(changed) if changed is not None else path.unlink()
