"""Fills stores with many names in seconds: it writes records as a store has them, without its checks."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from adapter_store.files.seal import seal
from adapter_store.manifest import PushFacts
from adapter_store.record import AliasEntry, NameRecord, VersionEntry
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.primary import Command, Primary
from adapter_store.redis_store.url import RedisUrl
from adapter_store.summary import lines_of

_BATCH = 500
Names = Iterable[tuple[str, NameRecord]]


def names(count: int, digests: tuple[str, ...] = ()) -> Iterator[tuple[str, NameRecord]]:
    """Each with the versions in `digests`, or one of its own without content; `latest` is the first."""
    for number in range(count):
        name = f"adapter-{number:06d}"
        versions = digests or (f"sha256:{hashlib.sha256(name.encode()).hexdigest()}",)
        facts = PushFacts(base_model="acme/base-8b")
        entry = VersionEntry(1.7e9 + number, max_rank=16, num_bytes=84_000_000, push=facts)
        alias = AliasEntry(versions[0], 1)
        yield name, NameRecord(dict.fromkeys(versions, entry), {"latest": alias})


def fill_folder(root: Path, tenant: str, records: Names) -> None:
    """Before anybody has listed the tenant."""
    folder = root / "names" / tenant
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in records:
        (folder / f"{name}.json").write_bytes(seal(f"{tenant}/{name}", record.to_json()))


def fill_redis(url: str, tenant: str, records: Names) -> None:
    parsed = RedisUrl.parse(url)
    primary, keys, batch = Primary(parsed), Keys(parsed.namespace), list[Command]()
    for name, record in records:
        key = keys.record(tenant, name)
        batch += [("SET", key, seal(key, record.to_json())), ("ZADD", keys.names(tenant), 0, f"{name}@")]
        batch += [("ZADD", keys.lines(tenant), 0, line) for line in lines_of(name, record)]
        if len(batch) >= _BATCH:
            primary.run(*batch)
            batch.clear()
    primary.run(*batch) if batch else None
