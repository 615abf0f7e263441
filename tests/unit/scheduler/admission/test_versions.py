"""Refs from memory: certain or not at all."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import (
    AdapterNotFound,
    DataLoss,
    DiskStore,
    Manifest,
    ModelSpec,
    NameRecord,
    News,
    Ref,
    StoreUnavailable,
    Version,
    VersionState,
)
from scheduler.admission.versions import MAX_AGE_S, Versions
from tests.support.services.cluster import wait_until
from tests.support.services.fakes import ManualClock

LATEST = Ref.parse("acme/x", "")


class Leaving(DiskStore):
    away = damaged = False
    silent: threading.Event | None = None
    reads = 0

    def record(self, tenant: str, name: str) -> NameRecord:
        self.reads += 1
        self._must_answer()
        if self.damaged:
            raise DataLoss("the record is damaged")
        return super().record(tenant, name)

    def news(self, since: int) -> News:
        self._must_answer()
        return super().news(since)

    def _must_answer(self) -> None:
        if self.silent is not None:
            self.silent.wait(60)
        if self.away:
            raise StoreUnavailable("the disk is away")


@pytest.fixture
def store(tmp_path: Path) -> Leaving:
    return Leaving(tmp_path / "store")


@pytest.fixture
def other(store: Leaving, tmp_path: Path) -> DiskStore:
    """Another process's."""
    return DiskStore(tmp_path / "store")


@pytest.fixture
def version(other: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]) -> Version:
    return other.put(peft_folder(1), "acme", "x", spec)


@pytest.fixture
def newer(other: DiskStore, version: Version, spec: ModelSpec, peft_folder: Callable[..., Path]) -> Version:
    return other.put(peft_folder(2), "acme", "x", spec, alias=None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def sources() -> list[str]:
    return []


@pytest.fixture
def versions(store: Leaving, clock: ManualClock, sources: list[str]) -> Versions:
    versions = Versions(store, 1.0, clock=clock, count=sources.append)
    versions.ask()
    return versions


def at(version: Version) -> Ref:
    return Ref("acme", "x", digest=version.digest)


def test_one_read_serves_until_the_news_say_otherwise(
    versions: Versions,
    store: Leaving,
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


def test_an_alias_that_was_read_too_long_ago_when_its_manifest_comes_is_unavailable(
    versions: Versions,
    store: Leaving,
    other: DiskStore,
    version: Version,
    newer: Version,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = store.manifest

    def slow(digest: str) -> Manifest:
        other.set_alias("acme", "x", "latest", newer.digest)
        clock.advance(5.0)
        return manifest(digest)

    monkeypatch.setattr(store, "manifest", slow)
    with pytest.raises(StoreUnavailable, match="slow"):
        versions.resolve(LATEST)
    monkeypatch.undo()
    versions.ask()
    assert versions.resolve(LATEST) == newer


def test_of_another_name_s_change_nothing_is_read_again(
    versions: Versions, store: Leaving, other: DiskStore, version: Version
) -> None:
    versions.resolve(LATEST)
    other.split_alias("acme", "x", "mine", {version.digest: 1})
    other.delete_alias("acme", "x", "mine")
    versions.ask()
    versions.resolve(LATEST)
    before = store.reads
    assert versions.resolve(LATEST) == version
    assert store.reads == before


def test_an_alias_that_is_not_confirmed_in_time_is_unavailable_and_a_digest_is_not(
    versions: Versions,
    store: Leaving,
    version: Version,
    newer: Version,
    clock: ManualClock,
    sources: list[str],
) -> None:
    assert versions.resolve(LATEST) == version
    store.away = True
    with pytest.raises(StoreUnavailable):
        versions.ask()
    assert versions.resolve(LATEST) == version  # confirmed less than a second ago
    clock.advance(1.01)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            versions.resolve(LATEST)
        assert versions.resolve(at(version)) == version
        with pytest.raises(StoreUnavailable):
            versions.resolve(at(newer))  # nobody has asked for its content yet
        with pytest.raises(StoreUnavailable):
            versions.resolve(Ref("zoo", "x", digest=version.digest))  # another tenant's memory is not ours
    assert sources[-1] == "memory_unconfirmed" and store.reads == 1
    store.away = False
    versions.ask()
    assert versions.resolve(LATEST) == version


def test_a_store_that_is_silent_is_waited_for_no_longer_than_the_staleness(
    store: Leaving, version: Version
) -> None:
    """On real clocks: the thread hangs in its question, as it does with a paused server."""
    versions = Versions(store, 2.0)  # more than a busy machine takes between a question and an answer
    versions.ask()
    assert versions.resolve(LATEST) == version
    store.silent = threading.Event()
    versions.start()
    with pytest.raises(StoreUnavailable):
        while True:
            versions.resolve(LATEST)
    assert versions.resolve(at(version)) == version
    store.silent.set()
    versions.stop()
    store.silent = None
    versions.ask()
    assert versions.resolve(LATEST) == version


def test_a_pause_of_this_process_is_no_silence_of_the_store(store: Leaving, version: Version) -> None:
    """It is stopped in the middle of a question; who asks right afterwards waits for the store's news."""
    clock, awake = ManualClock(), ManualClock()
    versions = Versions(store, 1.0, clock=clock, awake=awake)
    versions.ask()
    assert versions.resolve(LATEST) == version
    store.silent = threading.Event()
    versions.start()
    wait_until(lambda: versions._asking_since is not None, "the store is asked")
    clock.advance(55.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(versions.resolve, LATEST)
        assert not wait([answer], timeout=0.2).done
        store.silent.set()
        assert answer.result(60) == version
    versions.stop()


def test_who_waits_for_news_when_they_stop_waits_no_more(store: Leaving, version: Version) -> None:
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
    versions: Versions, store: Leaving, other: DiskStore, version: Version, newer: Version
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
    versions: Versions, store: Leaving, other: DiskStore, version: Version, newer: Version
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


def test_unknown_names_take_no_memory(versions: Versions, store: Leaving) -> None:
    for number in range(10_000):
        with pytest.raises(AdapterNotFound):
            versions.resolve(Ref.parse(f"acme/nobody-{number}", ""))
    assert len(versions) == 0 and store.reads == 10_000


def test_keys_of_a_split_alias_are_told_apart(
    versions: Versions, other: DiskStore, store: Leaving, version: Version, newer: Version
) -> None:
    other.split_alias("acme", "x", "prod", {version.digest: 1, newer.digest: 1})
    ref = Ref.parse("acme/x@prod", "")
    found = {key: versions.resolve(ref, key).digest for key in map(str, range(40))}
    assert set(found.values()) == {version.digest, newer.digest}
    assert {key: other.resolve(ref, key).digest for key in found} == found
    assert store.reads <= 3


def test_a_digest_of_a_name_that_has_changed_is_not_answered_from_memory_while_the_store_is_away(
    versions: Versions, store: Leaving, other: DiskStore, version: Version, newer: Version, clock: ManualClock
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
    versions: Versions, store: Leaving, other: DiskStore, version: Version, newer: Version, clock: ManualClock
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
    versions: Versions, store: Leaving, other: DiskStore, version: Version
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
    pushed = other.put(peft_folder(3), "acme", "x", spec, alias=None)
    assert versions.resolve(at(pushed)) == pushed
    with pytest.raises(AdapterNotFound):
        versions.resolve(Ref.parse("acme/new", ""))
    other.put(peft_folder(3), "acme", "new", spec)
    assert versions.resolve(Ref.parse("acme/new", "")).name == "new"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["move", "ask", "resolve", "wait"]), st.integers(0, 1)), max_size=60
    ),
    staleness=st.sampled_from([0.25, 1.0]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_scheduler_serves_an_alias_longer_than_the_staleness_after_its_move(
    steps: list[tuple[str, int]],
    staleness: float,
    store: Leaving,
    other: DiskStore,
    version: Version,
    newer: Version,
) -> None:
    """Two schedulers, whatever order things happen in: the alias as it was within --alias-max-staleness, or
    UNAVAILABLE."""
    clock = ManualClock()
    other.set_alias("acme", "x", "latest", version.digest)
    schedulers = [Versions(store, staleness, clock=clock) for _ in range(2)]
    for each in schedulers:
        each._answers = False
    until = {version.digest: float("inf"), newer.digest: float("-inf")}  # When it last was the right answer.
    target = version.digest
    for what, number in steps:
        scheduler = schedulers[number]
        if what == "move":
            until[target], target = clock.now, (newer if target == version.digest else version).digest
            other.set_alias("acme", "x", "latest", target)
            until[target] = float("inf")
        elif what == "ask":
            scheduler.ask()
            scheduler._answers = False  # Nobody waits for a thread that does not run here.
        elif what == "wait":
            clock.advance(0.1 + 0.3 * number)
        else:
            try:
                found = scheduler.resolve(LATEST).digest
            except StoreUnavailable:
                assert scheduler.age_s > staleness
            else:
                assert until[found] >= clock.now - staleness
