"""Two processes, one name: exactly one order of events, and every loser gets a typed answer."""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapter_store import (
    AdapterNotFound,
    AdapterStore,
    AdapterStoreError,
    ModelSpec,
    NameRecord,
    PushOptions,
    Ref,
)
from tests.support.stores.media import Medium, RedisMedium, versions_in

ROUNDS = 20
FORK = multiprocessing.get_context("fork")
LATEST = Ref.parse("acme/x", "")


def race(medium: Medium, *actions: Callable[[AdapterStore], object]) -> list[str]:
    """Runs each action at the same moment in its own process; returns "ok" or the error's name for each."""
    barrier, outcomes = FORK.Barrier(len(actions)), FORK.Array("c", 64 * len(actions))

    def run(index: int) -> None:
        store = medium.open()
        barrier.wait(60)
        try:
            actions[index](store)
            outcome = "ok"
        except AdapterStoreError as error:
            outcome = type(error).__name__
        outcomes[64 * index : 64 * index + len(outcome)] = outcome.encode()

    processes = [FORK.Process(target=run, args=(index,)) for index in range(len(actions))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    raw: Any = outcomes[:]
    return [raw[64 * i : 64 * i + 64].rstrip(b"\0").decode() for i in range(len(actions))]


def check(medium: Medium) -> AdapterStore:
    store = medium.open()
    for version in versions_in(store, "acme"):
        store.verify(Ref("acme", version.name, digest=version.digest))
    assert medium.digests() == {version.digest for version in versions_in(store, "acme")}
    return store


def put(
    folder: Path, spec: ModelSpec, expected_generation: int | None = None
) -> Callable[[AdapterStore], object]:
    options = PushOptions(expected_generation=expected_generation)
    return lambda store: store.put(folder, "acme", "x", spec, options)


def test_two_pushes_make_ordered_versions(medium: Medium, adapters: list[Path], spec: ModelSpec) -> None:
    for _ in range(ROUNDS):
        assert race(medium, put(adapters[0], spec), put(adapters[1], spec)) == ["ok", "ok"]
        store = check(medium)
        versions = {version.digest for version in versions_in(store, "acme")}
        assert len(versions) == 2 and store.resolve(LATEST).digest in versions
        for digest in versions - {store.resolve(LATEST).digest}:
            store.delete(Ref("acme", "x", digest=digest))
        store.delete(LATEST)


def test_one_push_wins_when_both_expect_the_same_generation(
    medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    for _ in range(ROUNDS):
        pushes = [put(folder, spec, expected_generation=0) for folder in adapters[:2]]
        assert sorted(race(medium, *pushes)) == ["GenerationMismatch", "ok"]
        store = check(medium)
        [version] = versions_in(store, "acme")
        store.delete(Ref.parse("acme/x", ""))
        with pytest.raises(AdapterNotFound):
            store.open(version.digest)


def test_the_same_content_twice_is_one_version(medium: Medium, adapters: list[Path], spec: ModelSpec) -> None:
    for _ in range(ROUNDS):
        assert race(medium, put(adapters[0], spec), put(adapters[0], spec)) == ["ok", "ok"]
        store = check(medium)
        assert len(versions_in(store, "acme")) == 1 and store.aliases("acme")[0].generation == 1
        store.delete(LATEST)


def test_one_of_two_deletes_finds_nothing(medium: Medium, adapters: list[Path], spec: ModelSpec) -> None:
    for _ in range(ROUNDS):
        medium.open().put(adapters[0], "acme", "x", spec)
        outcome = race(medium, lambda store: store.delete(LATEST), lambda store: store.delete(LATEST))
        assert sorted(outcome) == ["AdapterNotFound", "ok"]
        assert versions_in(check(medium), "acme") == []


def test_push_and_delete_at_once(medium: Medium, adapters: list[Path], spec: ModelSpec) -> None:
    for _ in range(ROUNDS):
        medium.open().put(adapters[0], "acme", "x", spec)
        outcome = race(medium, put(adapters[1], spec), lambda store: store.delete(LATEST))
        assert outcome == ["ok", "ok"]
        store = check(medium)
        # Deleted first: one version is left. Pushed first: the delete took the new one, the old one is left.
        [left] = versions_in(store, "acme")
        for alias in store.aliases("acme"):
            store.delete_alias("acme", "x", alias.alias)
        store.delete(Ref("acme", "x", digest=left.digest))


def test_a_push_was_made_though_somebody_deletes_it_at_once(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec
) -> None:
    """A store in a folder answers before it lets the next one in."""
    store = redis_medium.open()
    publish = store._changes.publish

    def overtaken(*arguments: Any) -> NameRecord:
        record = publish(*arguments)
        redis_medium.open().delete(LATEST)
        return record

    store._changes.publish = overtaken  # type: ignore[method-assign]
    version = store.put(adapters[0], "acme", "x", spec)
    assert version.digest and versions_in(store, "acme") == []


def test_an_alias_and_the_delete_of_its_target_at_once(
    medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    version = medium.open().put(adapters[0], "acme", "x", spec, PushOptions(alias=None))
    for _ in range(ROUNDS):
        outcome = race(
            medium,
            lambda store: store.set_alias("acme", "x", "prod", version.digest),
            lambda store: store.delete(Ref("acme", "x", digest=version.digest)),
        )
        assert Counter(outcome)["ok"] == 1 and set(outcome) < {"ok", "InUse", "AdapterNotFound"}
        store = check(medium)
        assert len(store.aliases("acme")) == len(versions_in(store, "acme"))
        store.put(adapters[0], "acme", "x", spec, PushOptions(alias=None))
        for alias in store.aliases("acme"):
            store.delete_alias("acme", "x", alias.alias)


def test_readers_see_whole_versions_while_writers_work(
    medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    """One store object shared by threads, as in the services."""
    store = medium.open()
    store.put(adapters[0], "acme", "x", spec)

    def write() -> None:
        for _ in range(ROUNDS):
            store.put(adapters[1], "acme", "x", spec)
            store.delete(LATEST)
            store.put(adapters[0], "acme", "x", spec)

    def read() -> int:
        seen = 0
        while not writing.done():
            try:
                with store.open(store.resolve(LATEST).digest) as weights:
                    seen += weights["layers.0.q_proj"].rank
                versions_in(store, "acme")
            except AdapterNotFound:
                continue
        return seen

    with ThreadPoolExecutor(3) as pool:
        writing = pool.submit(write)
        readers = [pool.submit(read) for _ in range(2)]
        writing.result()
        assert all(reader.result() for reader in readers)
