"""What is said about versions and aliases: states, split aliases, listings, news. The same in every store."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    DataLoss,
    GenerationMismatch,
    InUse,
    InvalidRef,
    Lease,
    ModelSpec,
    Ref,
    Version,
    VersionState,
)
from adapter_store.record import NameRecord, VersionEntry
from tests.support.redis_server import RedisServer
from tests.support.stores import DiskMedium, Medium, RedisMedium

LATEST = Ref.parse("acme/x", "")
PROD = Ref.parse("acme/x@prod", "")
KEYS = [f"session-{number}" for number in range(400)]


@pytest.fixture
def store(medium: Medium) -> AdapterStore:
    return medium.open()


@pytest.fixture
def versions(store: AdapterStore, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    """Three versions of acme/x, pushed in order: latest is the last one."""
    return [store.put(folder, "acme", "x", spec) for folder in adapters]


def at(version: Version) -> Ref:
    return Ref(version.tenant, version.name, digest=version.digest)


def collected(store: AdapterStore, **options: bool) -> list[str]:
    return [summary.digest for summary in store.collect(0, lambda _: False, **options)]


# ---- states


def test_a_version_that_an_alias_of_a_migration_holds_stops_no_collection(
    store: AdapterStore, versions: list[Version]
) -> None:
    first, second, _ = versions
    record = store.record("acme", "x")
    store.withdraw(at(first))
    deleted = store.record("acme", "x")
    store.take_over("acme", "x", record)
    store.set_alias("acme", "x", "prod", first.digest)
    store.take_over("acme", "x", deleted)
    store.withdraw(at(second))
    assert collected(store) == [second.digest]


def test_what_an_alias_points_to_is_not_taken_over_as_deleted(
    store: AdapterStore, versions: list[Version]
) -> None:
    """It was deleted in the store that is moved from, and somebody has moved an alias to it here."""
    first, second, last = versions
    for version in (first, second):
        store.withdraw(at(version))
    elsewhere = store.record("acme", "x")
    for version in (first, second):
        store.take_over("acme", "x", NameRecord({version.digest: VersionEntry(1.0)}))
    store.split_alias("acme", "x", "prod", {first.digest: 9, last.digest: 1})
    store.take_over("acme", "x", elsewhere)
    states = {version.digest: version.state for version in map(store.find, map(at, versions))}
    assert states[first.digest] is VersionState.ACTIVE
    assert states[second.digest] is VersionState.DELETED
    assert store.resolve(PROD) == store.find(at(first))
    assert collected(store) == [second.digest]


def test_a_deleted_version_gets_no_requests_and_keeps_its_bytes_until_collected(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    first = versions[0]
    gone = store.withdraw(at(first))
    assert (gone.state, gone.digest) == (VersionState.DELETED, first.digest)
    with pytest.raises(AdapterNotFound):
        store.resolve(at(first))
    with pytest.raises(AdapterNotFound):
        store.set_alias("acme", "x", "prod", first.digest)
    assert first.digest not in {version.digest for version in store.list("acme")}
    assert medium.open().find(at(first)).state is VersionState.DELETED
    store.open(first.digest).close()
    assert store.collect(3600, lambda _: False) == []  # not long enough ago
    assert store.collect(0, lambda summary: summary.digest == first.digest) == []  # in use
    assert collected(store, dry_run=True) == [first.digest]
    store.open(first.digest).close()
    assert collected(store) == [first.digest]
    assert collected(store) == []
    with pytest.raises(AdapterNotFound):
        store.find(at(first))
    with pytest.raises(AdapterNotFound):
        store.open(first.digest)
    assert medium.digests() == {version.digest for version in versions[1:]}


def test_a_second_withdrawal_finds_nothing(store: AdapterStore, versions: list[Version]) -> None:
    store.withdraw(at(versions[0]))
    with pytest.raises(AdapterNotFound):
        store.withdraw(at(versions[0]))
    store.withdraw(LATEST)
    with pytest.raises(AdapterNotFound):
        store.withdraw(LATEST)


def test_withdrawing_is_refused_while_something_points_there_unless_forced(
    store: AdapterStore, versions: list[Version]
) -> None:
    last = versions[2]
    store.set_alias("acme", "x", "prod", last.digest)
    with pytest.raises(InUse, match="alias 'latest'"):
        store.withdraw(at(last))
    with pytest.raises(InUse, match="alias 'prod'"):
        store.withdraw(LATEST)
    store.set_protected("acme", "x", versions[0].digest, True)
    with pytest.raises(InUse, match="protected"):
        store.withdraw(at(versions[0]))
    assert not store.withdraw(at(versions[0]), force=True).protected
    store.withdraw(at(last), force=True, end_requests=True)
    assert store.record("acme", "x").versions[last.digest].ends_requests
    assert store.aliases("acme") == []


def test_draining_leaves_aliases_and_a_push_makes_active_again(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    last = versions[2]
    assert store.withdraw(at(last), VersionState.DRAINING).state is VersionState.DRAINING
    for ref in (LATEST, at(last)):
        with pytest.raises(AdapterNotFound):
            store.resolve(ref)
    assert [v.state for v in store.list("acme") if v.digest == last.digest] == [VersionState.DRAINING]
    assert collected(store) == []
    assert store.put(adapters[2], "acme", "x", spec) == last == store.resolve(LATEST)
    store.withdraw(at(versions[0]))
    assert store.put(adapters[0], "acme", "x", spec, alias=None) == versions[0]
    assert collected(store) == []


def test_content_that_another_name_has_survives_a_collection(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    other = store.put(adapters[0], "zoo", "y", spec)
    store.withdraw(at(versions[0]))
    assert store.resolve(at(other)) == other
    assert collected(store) == [other.digest]
    store.open(other.digest).close()


def test_a_version_in_quarantine_is_data_loss_until_it_is_pushed_again(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    first = versions[0]
    store.set_quarantined("acme", "x", first.digest, True)
    with pytest.raises(DataLoss, match="push the adapter again"):
        store.resolve(at(first))
    assert store.find(at(first)).quarantined and store.resolve(LATEST) == versions[2]
    assert [s.digest for s in store.summaries("acme") if s.quarantined] == [first.digest]
    store.put(adapters[0], "acme", "x", spec, alias=None)
    assert store.resolve(at(first)) == first


def test_a_repairing_push_is_not_undone_by_who_looked_before_it(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    first = versions[0]
    seen = store.upload(first.digest)
    assert medium.open().upload(first.digest) == seen != store.upload(versions[1].digest)
    medium.change_packed(first.digest, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataLoss):
        store.verify(at(first))
    medium.open().put(adapters[0], "acme", "x", spec, alias=None)
    assert not store.set_quarantined("acme", "x", first.digest, True, upload=seen)
    assert store.resolve(at(first)) == first
    assert store.upload(first.digest) != seen
    assert store.set_quarantined("acme", "x", first.digest, True, upload=store.upload(first.digest))
    with pytest.raises(DataLoss):
        store.resolve(at(first))
    store.delete(at(first))
    assert store.upload(first.digest) == ""


# ---- who has a content


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
    store.put(adapters[0], "acme", "x", spec, alias=None)
    medium.change_record("acme", "a", lambda record: b"{")
    assert store.active_names(first.digest) == [("acme", "x")]  # it serves nobody
    collected(store)
    store.delete(at(first))
    store.open(first.digest).close()  # what the damaged record has is not known
    assert store.active_names("sha256:" + "0" * 64) == []


# ---- damaged records


def test_a_damaged_record_hides_no_aliases_of_others_and_is_told(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    store.put(adapters[0], "acme", "y", spec)
    assert store.damaged("acme") == []
    medium.change_record("acme", "x", lambda record: record[:-1] + b"?")
    again = medium.open()
    for each in (store, again):
        assert [(alias.name, alias.alias) for alias in each.aliases("acme")] == [("y", "latest")]
        with pytest.raises(DataLoss):
            each.aliases("acme", "x")
        assert each.orphans() == []  # it may have them all
        assert (each.damaged("acme"), each.damaged("zoo")) == (["x"], [])


# ---- leases


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


def test_grace_is_counted_by_the_store_s_clock(
    store: AdapterStore, versions: list[Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose own clock is an hour ahead, or behind, removes nothing too early and nothing too late."""
    now = time.time()
    assert abs(store.now() - now) < 60
    for skew in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
        store.withdraw(at(versions[0 if skew > 0 else 1]))
        monkeypatch.undo()
    assert store.collect(600, lambda _: False) == []
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert set(collected(store)) == {version.digest for version in versions[:2]}


# ---- split aliases


def served(store: AdapterStore, key: str) -> str:
    return store.resolve(PROD, key).digest


def test_a_split_alias_gives_each_key_one_version(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    a, b, _ = (version.digest for version in versions)
    alias = store.split_alias("acme", "x", "prod", {a: 90, b: 10})
    assert (alias.digest, alias.weights, alias.generation) == (a, {a: 90, b: 10}, 1)
    assert store.split_alias("acme", "x", "prod", {b: 10, a: 90}).generation == 1
    assert [each.weights for each in store.aliases("acme", "x")] == [{}, {a: 90, b: 10}]
    choice = {key: served(store, key) for key in KEYS}
    assert set(choice.values()) == {a, b}
    assert sum(digest == b for digest in choice.values()) < len(KEYS) / 4
    again = medium.open()
    assert {key: served(again, key) for key in KEYS} == choice
    assert store.resolve(PROD).digest == a  # whoever has no key

    with pytest.raises(GenerationMismatch):
        store.split_alias("acme", "x", "prod", {a: 1, b: 1}, expected_generation=7)
    assert store.set_alias("acme", "x", "prod", a).weights == {}  # rolled back
    assert {served(store, key) for key in KEYS} == {a}


def test_what_holds_a_share_is_pointed_to(store: AdapterStore, versions: list[Version]) -> None:
    a, b, c = (version.digest for version in versions)
    store.split_alias("acme", "x", "prod", {a: 90, b: 10})
    for version in versions[:2]:
        with pytest.raises(InUse, match="prod"):
            store.withdraw(at(version))
    with pytest.raises(InUse, match="split"):
        store.withdraw(PROD)
    store.withdraw(at(versions[1]), VersionState.DRAINING)
    assert {served(store, key) for key in KEYS} == {a}  # its share goes to the rest
    store.withdraw(at(versions[1]), force=True)
    assert store.aliases("acme", "x")[1].weights == {}
    assert {s.digest: s.aliases for s in store.summaries("acme")} == {a: ("prod",), c: ("latest",)}


@pytest.mark.parametrize("targets", [{}, {"first": 0}, {"first": -1, "second": 1}, {"first": 10_000_000}])
def test_bad_weights_are_refused(
    store: AdapterStore, versions: list[Version], targets: dict[str, int]
) -> None:
    names = {"first": versions[0].digest, "second": versions[1].digest}
    with pytest.raises(InvalidRef):
        store.split_alias("acme", "x", "prod", {names[name]: weight for name, weight in targets.items()})
    with pytest.raises(AdapterNotFound):
        store.split_alias("acme", "x", "prod", {versions[0].digest: 1, "sha256:" + "0" * 64: 1})


# ---- listings


def test_summaries_tell_what_listings_show(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec
) -> None:
    for name in ("a", "a-b", "a.b", "a_b", "b", "a0"):
        for folder in adapters:
            store.put(folder, "acme", name, spec)
    store.set_protected("acme", "x", versions[0].digest, True)
    store.withdraw(at(versions[1]))
    found = store.summaries("acme")
    assert [(s.name, s.digest, s.max_rank, s.num_bytes, s.created_at, s.protected) for s in found] == [
        (v.name, v.digest, v.manifest.max_rank, v.manifest.num_bytes, v.created_at, v.protected)
        for v in store.list("acme")
    ]
    assert len(found) == 20
    assert [s.aliases for s in found if s.digest == versions[2].digest][-1] == ("latest",)
    everything = store.summaries("acme", deleted=True)
    assert [s.digest for s in everything if s.state is VersionState.DELETED] == [versions[1].digest]
    paged = []
    while page := store.summaries("acme", after=paged[-1].key if paged else "", limit=3):
        paged += page
    assert paged == found
    assert {s.name for s in store.summaries("acme", name="a.b")} == {"a.b"}
    assert store.summaries("acme", name="a.b", after=paged[-1].key) == []
    assert store.summaries("acme", name="nobody") == store.summaries("zoo") == []


def test_listings_follow_what_other_processes_do(
    store: AdapterStore, medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    other = medium.open()
    for name in ("b", "a", "c"):
        other.put(adapters[0], "acme", name, spec)
    assert [s.name for s in store.summaries("acme")] == ["a", "b", "c"]
    other.set_alias("acme", "a", "prod", other.resolve(Ref.parse("acme/a", "")).digest)
    assert store.summaries("acme", limit=1)[0].aliases == ("latest", "prod")
    other.delete(Ref.parse("acme/c", ""))
    other.put(adapters[1], "zoo", "z", spec)
    assert [s.name for s in store.summaries("acme")] == ["a", "b"]


def test_a_damaged_record_is_left_out_of_a_listing_and_nothing_else(
    versions: list[Version], store: AdapterStore, adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    store.put(adapters[0], "acme", "y", spec)
    medium.change_record("acme", "x", lambda record: b"{")
    assert "y" in [s.name for s in medium.open().summaries("acme")]


# ---- news


def changed(store: AdapterStore, action: Callable[[], object]) -> set[tuple[str, str]] | None:
    before = store.news(-1).number
    action()
    names = store.news(before).names
    return None if names is None else set(names)


def test_news_name_what_changed(
    store: AdapterStore, versions: list[Version], medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    other = medium.open()
    a = versions[0].digest
    assert changed(store, lambda: None) == set()
    assert changed(store, lambda: other.set_alias("acme", "x", "prod", a)) == {("acme", "x")}
    assert changed(store, lambda: other.set_alias("acme", "x", "prod", a)) == set()
    assert changed(store, lambda: other.put(adapters[0], "zoo", "y", spec)) == {("zoo", "y")}

    def several() -> None:
        other.delete_alias("acme", "x", "prod")
        other.delete(Ref.parse("zoo/y", ""))
        other.withdraw(at(versions[0]))

    assert changed(store, several) == {("acme", "x"), ("zoo", "y")}
    assert changed(store, lambda: collected(other)) == {("acme", "x")}
    assert store.news(-1).names is None
    assert store.news(store.news(-1).number + 5).names is None  # of another store, or one that was restored
