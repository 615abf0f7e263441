"""Which names have a content, and what schedulers say that they still use."""

import time
from pathlib import Path

from adapter_store import (
    AdapterStore,
    Lease,
    ModelSpec,
    PushOptions,
    Ref,
    Version,
    VersionState,
)
from tests.support.stores.media import DiskMedium, Medium, RedisMedium, at, collected
from tests.support.stores.redis_server import RedisServer


def test_names_that_share_a_content(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    first = versions[0]
    for tenant, name in (("zoo", "y"), ("acme", "a")):
        store.put(adapters[0], tenant, name, spec)
    everybody = [("acme", "a"), ("acme", "x"), ("zoo", "y")]
    assert store.active_names(first.digest) == medium.open().active_names(first.digest) == everybody
    assert store.active_names(versions[1].digest) == [("acme", "x")]
    store.withdraw(at(first), VersionState.DRAINING)
    store.withdraw(Ref.parse("zoo/y", ""))
    assert medium.open().active_names(first.digest) == [("acme", "a")]
    store.put(adapters[0], "acme", "x", spec, PushOptions(alias=None))
    medium.change_record("acme", "a", lambda record: b"{")
    assert store.active_names(first.digest) == [("acme", "x")]  # it serves nobody
    collected(store)
    store.delete(at(first))
    store.open(first.digest).close()  # what the damaged record has is not known
    assert store.active_names("sha256:" + "0" * 64) == []


def test_leases_say_what_others_use_until_they_are_let_go_or_run_out(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    other, used = medium.open(), frozenset({("acme/x", versions[0].digest)})
    store.hold(Lease("one", 3, used))
    other.hold(Lease("two", 4))
    assert sorted(store.leases(), key=lambda lease: lease.holder) == [Lease("one", 3, used), Lease("two", 4)]
    store.hold(Lease("one", 5))
    other.hold(Lease("killed", 5, used, seconds=0.01))
    other.let_go("two")
    other.let_go("nobody")
    time.sleep(0.05)
    assert store.leases() == other.leases() == [Lease("one", 5)]


def test_a_damaged_lease_has_seen_nothing(
    store: AdapterStore, medium: Medium, redis_server: RedisServer
) -> None:
    store.hold(Lease("one", 5))
    if isinstance(medium, DiskMedium):
        file = medium.root / "leases" / "one"
        file.write_bytes(file.read_bytes().replace(b"5", b"9"))
    elif isinstance(medium, RedisMedium):
        with redis_server.client() as client:
            value = client.hget(medium.keys.leased, "one")
            client.hset(medium.keys.leased, "one", value.replace(b"5", b"9"))
    assert store.leases() == [Lease("one", -1)]


def test_holders_hear_what_others_tell_where_the_medium_is_fast(store: AdapterStore) -> None:
    if store.exchange("a", "one", 60.0) is None:
        return  # A folder.
    assert store.exchange("b", "two", 60.0) == {"a": "one", "b": "two"}
    assert store.exchange("a", "three", 0.0) == {"b": "two"}
    assert store.exchange("b", "", 60.0) == {}


def test_all_who_share_a_store_have_one_secret_that_stays(store: AdapterStore, medium: Medium) -> None:
    first = store.secret()
    assert len(first) == 32 and store.secret() == medium.open().secret() == first
    if isinstance(medium, DiskMedium):
        assert (medium.root / "secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_is_not_whole_is_made_anew(
    store: AdapterStore, medium: Medium, redis_server: RedisServer
) -> None:
    """With an empty one anybody could sign."""
    store.secret()
    if isinstance(medium, DiskMedium):
        (medium.root / "secret").write_bytes(b"")
    elif isinstance(medium, RedisMedium):
        with redis_server.client() as client:
            client.set(medium.keys.secret, b"")
    assert len(store.secret()) == 32 and store.secret() == medium.open().secret()
