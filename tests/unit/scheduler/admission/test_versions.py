"""Refs from memory: certain or not at all."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from adapter_store import (
    AdapterNotFound,
    DataLoss,
    DiskStore,
    ModelSpec,
    NameRecord,
    PushOptions,
    Ref,
    StoreUnavailable,
    Version,
    VersionState,
)
from scheduler.admission.versions import MAX_AGE_S, Versions
from tests.support.services.cluster import wait_until
from tests.support.services.fakes import ManualClock
from tests.support.stores.leaving_store import LATEST, LeavingStore, at


def test_one_read_serves_until_the_news_say_otherwise(
    versions: Versions,
    store: LeavingStore,
    other: DiskStore,
    version: Version,
    newer: Version,
    clock: ManualClock,
    sources: list[str],
) -> None:
    assert versions.known(LATEST) is None
    for _ in range(3):
        assert versions.resolve(LATEST) == version
        assert versions.resolve(at(version)) == version
    assert (store.reads, sources) == (1, ["store", *["memory"] * 5])
    other.set_alias("acme", "x", "latest", newer.digest)
    assert versions.resolve(LATEST) == version  # not confirmed since, but not too old, either
    versions.ask()
    assert versions.known(LATEST) is None
    assert versions.resolve(LATEST) == newer
    assert store.reads == 2
    versions.ask()
    assert versions.known(LATEST) == newer
    clock.advance(MAX_AGE_S + 1)
    versions.ask()
    assert versions.resolve(LATEST) == newer and store.reads == 3  # a failover may have lost some news


def test_of_another_name_s_change_nothing_is_read_again(
    versions: Versions, store: LeavingStore, other: DiskStore, version: Version
) -> None:
    versions.resolve(LATEST)
    other.split_alias("acme", "x", "mine", {version.digest: 1})
    other.delete_alias("acme", "x", "mine")
    versions.ask()
    versions.resolve(LATEST)
    before = store.reads
    assert versions.resolve(LATEST) == version
    assert store.reads == before


def test_who_waits_for_news_when_they_stop_waits_no_more(store: LeavingStore, version: Version) -> None:
    """The clock of a process that ends stands still, and its threads are waited for."""
    clock = ManualClock()
    versions = Versions(store, 1.0, clock=clock, awake=ManualClock())
    versions.ask()
    assert versions.resolve(LATEST) == version
    clock.advance(55.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(versions.resolve, LATEST)
        assert not wait([answer], timeout=0.2).done
        versions.stop()
        try:
            with pytest.raises(StoreUnavailable):
                answer.result(5)
        finally:
            versions.ask()


def test_what_leaves_active_is_not_found_by_digest_either(
    versions: Versions, store: LeavingStore, other: DiskStore, version: Version, newer: Version
) -> None:
    assert versions.resolve(at(newer)) == newer
    other.withdraw(at(newer), VersionState.DRAINING)
    versions.ask()
    for _ in range(2):  # read, then remembered
        with pytest.raises(AdapterNotFound):
            versions.resolve(at(newer))
    entry = versions.entry("acme", "x", newer.digest)
    assert entry is not None and entry.state is VersionState.DRAINING
    other.set_quarantined("acme", "x", version.digest, True)
    versions.ask()
    with pytest.raises(DataLoss):
        versions.resolve(LATEST)
    store.away = True
    with pytest.raises(StoreUnavailable):
        versions.ask()
    assert versions.entry("acme", "x", "sha256:" + "0" * 64) is None


def test_own_changes_count_at_once(
    versions: Versions, other: DiskStore, version: Version, newer: Version
) -> None:
    assert versions.resolve(LATEST) == version
    other.set_alias("acme", "x", "latest", newer.digest)
    versions.forget("acme", "x")
    assert versions.resolve(LATEST) == newer


def test_a_read_that_a_change_overtakes_is_not_kept(
    versions: Versions, store: LeavingStore, other: DiskStore, version: Version, newer: Version
) -> None:
    read = store.record

    def slow(tenant: str, name: str) -> NameRecord:
        record = read(tenant, name)
        other.set_alias("acme", "x", "latest", newer.digest)
        versions.ask()
        return record

    store.record = slow  # type: ignore[method-assign]
    assert versions.resolve(LATEST) == version  # as it was when it was read
    store.record = read  # type: ignore[method-assign]
    assert versions.resolve(LATEST) == newer


def test_unknown_names_take_no_memory(versions: Versions, store: LeavingStore) -> None:
    for number in range(10_000):
        with pytest.raises(AdapterNotFound):
            versions.resolve(Ref.parse(f"acme/nobody-{number}", ""))
    assert len(versions) == 0 and store.reads == 10_000


def test_keys_of_a_split_alias_are_told_apart(
    versions: Versions, other: DiskStore, store: LeavingStore, version: Version, newer: Version
) -> None:
    other.split_alias("acme", "x", "prod", {version.digest: 1, newer.digest: 1})
    ref = Ref.parse("acme/x@prod", "")
    found = {key: versions.resolve(ref, key).digest for key in map(str, range(40))}
    assert set(found.values()) == {version.digest, newer.digest}
    assert {key: other.resolve(ref, key).digest for key in found} == found
    assert store.reads <= 3


def test_a_digest_of_a_name_that_has_changed_is_not_answered_from_memory_while_the_store_is_away(
    versions: Versions,
    store: LeavingStore,
    other: DiskStore,
    version: Version,
    newer: Version,
    clock: ManualClock,
) -> None:
    """It may have been withdrawn: what was known does not count any more, and what is new is not known."""
    assert versions.resolve(at(version)) == version and versions.takes(at(version))
    other.withdraw(at(newer), VersionState.DRAINING)
    versions.ask()
    store.away = True
    with pytest.raises(StoreUnavailable):
        versions.ask()
    for seconds in (0.0, 1.01):
        clock.advance(seconds)
        assert not versions.takes(at(version))
        with pytest.raises(StoreUnavailable):
            versions.resolve(at(version))
    store.away = False
    versions.ask()
    assert versions.resolve(at(version)) == version and versions.takes(at(version))
    with pytest.raises(AdapterNotFound):
        versions.takes(at(newer))


def test_a_digest_of_a_name_that_has_changed_is_certain_again_before_anybody_asks(
    versions: Versions,
    store: LeavingStore,
    other: DiskStore,
    version: Version,
    newer: Version,
    clock: ManualClock,
) -> None:
    assert versions.resolve(at(version)) == version and store.reads == 1
    versions.start()
    other.set_alias("acme", "x", "latest", newer.digest)
    other.set_protected("acme", "x", version.digest, True)
    wait_until(lambda: (found := versions.known(at(version))) and found.protected, "the news were read")
    store.away = True
    clock.advance(1.01)
    found = versions.resolve(at(version))
    assert found.manifest == version.manifest and found.protected
    with pytest.raises(StoreUnavailable):
        versions.resolve(LATEST)
    versions.stop()


def test_a_damaged_record_among_the_news_is_told_to_who_asks(
    versions: Versions, store: LeavingStore, other: DiskStore, version: Version
) -> None:
    assert versions.resolve(at(version)) == version
    store.damaged = True
    other.set_protected("acme", "x", version.digest, True)
    versions.start()
    wait_until(lambda: len(versions) == 0, "it was looked at")
    with pytest.raises(DataLoss):
        versions.resolve(at(version))
    versions.stop()


def test_a_version_that_was_not_there_is_found_when_it_is_pushed(
    versions: Versions, other: DiskStore, version: Version, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    """What was not found is asked for again each time, news or not."""
    assert versions.resolve(LATEST) == version
    third = Ref("acme", "x", digest="sha256:" + "3" * 64)
    for _ in range(2):
        with pytest.raises(AdapterNotFound):
            versions.resolve(third)
    pushed = other.put(peft_folder(3), "acme", "x", spec, PushOptions(alias=None))
    assert versions.resolve(at(pushed)) == pushed
    with pytest.raises(AdapterNotFound):
        versions.resolve(Ref.parse("acme/new", ""))
    other.put(peft_folder(3), "acme", "new", spec)
    assert versions.resolve(Ref.parse("acme/new", "")).name == "new"
