"""Refs from memory that the store has not confirmed for too long are not answered."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import (
    DiskStore,
    Manifest,
    Ref,
    StoreUnavailable,
    Version,
)
from scheduler.admission.versions import Versions
from tests.support.services.cluster import wait_until
from tests.support.services.fakes import ManualClock
from tests.support.stores.leaving_store import LATEST, LeavingStore, at


def test_an_alias_that_was_read_too_long_ago_when_its_manifest_comes_is_unavailable(
    versions: Versions,
    store: LeavingStore,
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


def test_an_alias_that_is_not_confirmed_in_time_is_unavailable_and_a_digest_is_not(
    versions: Versions,
    store: LeavingStore,
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
    store: LeavingStore, version: Version
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


def test_a_pause_of_this_process_is_no_silence_of_the_store(store: LeavingStore, version: Version) -> None:
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
    store: LeavingStore,
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
