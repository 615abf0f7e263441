"""ACTIVE, DRAINING, DELETED, collected; and in quarantine."""

import time
from pathlib import Path

import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    DataLoss,
    InUse,
    ModelSpec,
    PushOptions,
    Ref,
    Version,
    VersionState,
)
from adapter_store.record import NameRecord, VersionEntry
from tests.support.stores.media import Medium, at, collected, versions_in

LATEST = Ref.parse("acme/x", "")
PROD = Ref.parse("acme/x@prod", "")


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
    assert first.digest not in {version.digest for version in versions_in(store, "acme")}
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
    assert [v.state for v in versions_in(store, "acme") if v.digest == last.digest] == [VersionState.DRAINING]
    assert collected(store) == []
    assert store.put(adapters[2], "acme", "x", spec) == last == store.resolve(LATEST)
    store.withdraw(at(versions[0]))
    assert store.put(adapters[0], "acme", "x", spec, PushOptions(alias=None)) == versions[0]
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
    store.put(adapters[0], "acme", "x", spec, PushOptions(alias=None))
    assert store.resolve(at(first)) == first


def test_a_repairing_push_is_not_undone_by_who_looked_before_it(
    store: AdapterStore, versions: list[Version], adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    first = versions[0]
    seen = store.upload(at(first))
    assert medium.open().upload(at(first)) == seen != store.upload(at(versions[1]))
    medium.change_packed(first.digest, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataLoss):
        store.verify(at(first))
    medium.open().put(adapters[0], "acme", "x", spec, PushOptions(alias=None))
    assert not store.set_quarantined("acme", "x", first.digest, True, upload=seen)
    assert store.resolve(at(first)) == first
    assert store.upload(at(first)) != seen
    assert store.set_quarantined("acme", "x", first.digest, True, upload=store.upload(at(first)))
    with pytest.raises(DataLoss):
        store.resolve(at(first))
    store.delete(at(first))
    assert store.upload(at(first)) == ""


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


def test_a_drained_version_is_active_again_whoever_says_so(
    store: AdapterStore, versions: list[Version], medium: Medium
) -> None:
    first, last = versions[0], versions[2]
    store.withdraw(at(last), VersionState.DRAINING, end_requests=True)
    other = medium.open()
    number = other.news(-1).number
    assert other.activate(at(last)) == last == store.resolve(LATEST)
    assert store.record("acme", "x").versions[last.digest].left_at == 0.0
    assert not store.record("acme", "x").versions[last.digest].ends_requests
    assert store.news(number).names == {("acme", "x")}
    assert (
        other.activate(at(last)) == last and store.news(number + 1).names == frozenset()
    )  # nothing to change
    store.withdraw(at(first))
    for ref in (at(first), Ref.parse("acme/nobody", "")):
        with pytest.raises(AdapterNotFound):
            store.activate(ref)


@pytest.mark.parametrize("state", list(VersionState)[1:])
def test_what_was_accepted_before_goes_on_with_a_withdrawn_version_unless_it_ends_with_it(
    store: AdapterStore, versions: list[Version], state: VersionState
) -> None:
    first, second, _ = versions
    store.withdraw(at(first), state)
    store.withdraw(at(second), state, end_requests=True)
    record = store.record("acme", "x")
    assert record.active_digest_of(at(first), None, resumed=True) == first.digest
    for ref, resumed in ((at(first), False), (at(second), True)):
        with pytest.raises(AdapterNotFound):
            record.active_digest_of(ref, None, resumed=resumed)
    store.set_quarantined("acme", "x", first.digest, True)
    with pytest.raises(DataLoss):
        store.record("acme", "x").active_digest_of(at(first), None, resumed=True)
