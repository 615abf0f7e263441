"""A killed uploader leaves nothing that shows and nothing that stays; a killed server keeps its word."""

import contextlib
import itertools
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapter_store import AdapterNotFound, ModelSpec, Ref, StoreUnavailable
from adapter_store.redis_store import scripts
from adapter_store.redis_store.index import Claim
from adapter_store.redis_store.primary import Provided
from adapter_store.redis_store.store import RedisStore
from tests.support.adapters.peft import edit_config
from tests.support.stores.crashes import run_until_step
from tests.support.stores.garbage import chunk_keys, garbage
from tests.support.stores.media import RedisMedium, at, versions_in
from tests.support.stores.redis_server import RedisServer

STEPS = ("sendall", "recv")  # before a command is sent, and before its reply is read
LATEST = Ref.parse("acme/x", "")


def pass_time(medium: RedisMedium) -> None:
    """As much as dead uploads are given: what expires is gone, and claims are due."""
    with medium.server.client() as client:
        for key in chunk_keys(medium):
            if client.ttl(key) > 0:
                client.delete(key)
        for claim in client.zrange(medium.keys.pending, 0, -1):
            client.zadd(medium.keys.pending, {claim: 0})


def state(store: RedisStore) -> tuple[list[tuple[str, str]], list[tuple[str, str, int]]]:
    versions = [(version.digest, version.push.base_model) for version in versions_in(store, "acme")]
    return versions, [(alias.alias, alias.digest, alias.generation) for alias in store.aliases("acme")]


Action = Callable[[RedisStore], object]


def crash_everywhere(server: RedisServer, prepare: Action, action: Action, every: int = 1) -> None:
    def fresh() -> RedisMedium:
        medium = RedisMedium(server, f"crash-{uuid.uuid4().hex}")
        prepare(medium.open())
        return medium

    medium = fresh()
    before = state(medium.open())
    action(medium.open())
    after = state(medium.open())
    assert before != after
    for step in itertools.count(0, every):
        medium = fresh()
        if run_until_step(lambda medium=medium: action(medium.open()), step, STEPS) >= 0:
            assert step > 10  # replies come in as many pieces as they like
            return
        assert garbage(medium) == []
        pass_time(medium)
        store = medium.open()
        assert state(store) in (before, after)
        for version in versions_in(store, "acme"):
            store.verify(Ref("acme", "x", digest=version.digest))
        assert garbage(medium) == []
        assert len(chunk_keys(medium)) == 3 * len(medium.digests())
        action(store)  # once more, as its user would
        assert state(store) == after


def test_an_uploader_killed_anywhere(
    redis_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    crash_everywhere(
        redis_server,
        lambda store: store.put(adapters[0], "acme", "x", spec),
        lambda store: store.put(adapters[1], "acme", "x", spec),
    )


def test_an_uploader_of_other_files_killed_anywhere(
    redis_server: RedisServer, adapters: list[Path], spec: ModelSpec, tmp_path: Path
) -> None:
    edited = Path(shutil.copytree(adapters[0], tmp_path / "edited"))
    edit_config(edited, base_model_name_or_path="another/name")
    crash_everywhere(
        redis_server,
        lambda store: store.put(adapters[0], "acme", "x", spec),
        lambda store: store.put(edited, "acme", "x", spec),
        every=2,
    )


def test_a_delete_killed_anywhere(redis_server: RedisServer, adapters: list[Path], spec: ModelSpec) -> None:
    def delete(store: RedisStore) -> None:
        try:
            store.delete(LATEST)
        except AdapterNotFound:
            assert versions_in(store, "acme") == []

    crash_everywhere(redis_server, lambda store: store.put(adapters[0], "acme", "x", spec), delete)


def test_an_upload_that_was_swept_is_not_published(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec
) -> None:
    """Its process slept for an hour between the last chunk and the end."""
    store = redis_medium.open()
    commit = store._metadata.commit

    def late(*arguments: object, **options: object) -> object:
        pass_time(redis_medium)
        redis_medium.open()  # sweeps
        return commit(*arguments, **options)  # type: ignore[arg-type]

    store._metadata.commit = late  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable, match="push the adapter again"):
        store.put(adapters[0], "acme", "x", spec)
    assert redis_medium.leftovers() == []


def test_a_claim_that_arrives_once_more_after_its_upload_is_published_harms_nothing(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec
) -> None:
    """A server may have read it long before it runs it; who sent it has given that connection up by then."""
    store, late = redis_medium.open(), list[Sequence[Any]]()
    run = store._primary.run

    def remember(*commands: Sequence[Any], **options: Any) -> list[Any]:
        late.extend(command for command in commands if command[:2] == ("EVAL", scripts.CLAIM))
        return run(*commands, **options)

    store._primary.run = remember  # type: ignore[method-assign]
    version = store.put(adapters[0], "acme", "x", spec)
    assert len(late) == 2  # of the content, and of the files of the push
    run(*late)
    pass_time(redis_medium)
    redis_medium.open().verify(at(version))


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_killed_server_has_what_it_acknowledged(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec, fsync: str
) -> None:
    with RedisServer(tmp_path / "redis", "--appendfsync", fsync) as server:
        store = RedisMedium(server, "crash").open()
        acknowledged: dict[str, str] = {}
        rounds, lock = threading.Semaphore(0), threading.Lock()
        stop = threading.Event()

        def push() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                name = f"n{number}"
                try:
                    digest = store.put(adapters[number % 3], "acme", name, spec).digest
                except StoreUnavailable:
                    continue
                with lock:
                    acknowledged[name] = digest
                rounds.release()

        pusher = threading.Thread(target=push)
        pusher.start()
        for _ in range(4):
            assert rounds.acquire(timeout=60)
            server.kill()
            with lock:
                expected = dict(acknowledged)
            server.start()
            fresh = RedisMedium(server, "crash").open()
            for name, digest in expected.items():
                assert fresh.verify(Ref("acme", name, alias="latest")).digest == digest
        stop.set()
        pusher.join()


def test_after_a_flush_everything_is_not_found_and_can_be_pushed_again(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    store = RedisMedium(own_server, "flushed").open()
    version = store.put(adapters[0], "acme", "x", spec)
    before = store.news(-1).number
    with own_server.client() as client:
        client.flushall()
    assert store.news(before).names is None
    for read in (lambda: store.resolve(LATEST), lambda: store.open(version.digest)):
        with pytest.raises(AdapterNotFound):
            read()
    assert versions_in(store, "acme") == []
    assert store.put(adapters[0], "acme", "x", spec).digest == version.digest
    assert store.news(before).names is None and store.news(before).number > before
    store.verify(LATEST)


def test_a_server_that_is_away_is_unavailable_and_comes_back(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    store = RedisMedium(own_server, "away").open()
    version = store.put(adapters[0], "acme", "x", spec)
    own_server.kill()
    actions: list[Callable[[], object]] = [
        lambda: store.resolve(LATEST),
        lambda: store.open(version.digest),
        lambda: store.put(adapters[1], "acme", "x", spec),
        lambda: store.set_alias("acme", "x", "prod", version.digest),
        lambda: versions_in(store, "acme"),
        lambda: RedisMedium(own_server, "away").open(),
    ]
    for action in actions:
        with pytest.raises(StoreUnavailable) as error:
            action()
        assert str(own_server.port) not in str(error.value)
    own_server.start()
    assert store.resolve(LATEST) == version
    with store.open(version.digest) as weights:
        assert len(weights) == 1


def test_a_flush_among_changes_leaves_what_is_whole_or_not_found(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    medium = RedisMedium(own_server, "flushes")
    stop, pushed = threading.Event(), threading.Semaphore(0)

    def push(number: int) -> None:
        store = medium.open()
        while not stop.is_set():
            with contextlib.suppress(StoreUnavailable, AdapterNotFound):  # it went with the flush
                store.put(adapters[number], "acme", f"n{number}", spec)
                store.delete(Ref("acme", f"n{number}", alias="latest"))
                store.put(adapters[number], "acme", f"n{number}", spec)
                pushed.release()

    reader = medium.open()
    with ThreadPoolExecutor(3) as pool, own_server.client() as client:
        pushers = [pool.submit(push, number) for number in range(3)]
        try:
            for _ in range(20):
                assert pushed.acquire(timeout=60)
                client.flushall()
                for number in range(3):
                    with contextlib.suppress(AdapterNotFound):
                        version = reader.resolve(Ref("acme", f"n{number}", alias="latest"))
                        with reader.open(version.digest) as weights:
                            assert weights.manifest == version.manifest
        finally:
            stop.set()
        for each in pushers:
            each.result()
        client.flushall()
    version = reader.put(adapters[0], "acme", "x", spec)
    assert reader.verify(LATEST).digest == version.digest
    assert garbage(medium) == []


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_server_that_dies_between_an_upload_and_its_publication(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec, fsync: str
) -> None:
    """What it lost is not published; what it kept may be."""
    with RedisServer(tmp_path / "redis", "--appendfsync", fsync) as server:
        medium = RedisMedium(server, "between")
        store = medium.open()
        chunks_stay = store._metadata._chunks_stay
        deaths = iter([1])

        def dying(claim: Claim, operation: str) -> Provided:
            provided = chunks_stay(claim, operation)

            def check(replies: Sequence[Any]) -> None:
                provided.check(replies)
                if next(deaths, None):
                    server.restart()

            return Provided(provided.commands, check)

        store._metadata._chunks_stay = dying  # type: ignore[method-assign]
        with contextlib.suppress(StoreUnavailable):
            store.put(adapters[0], "acme", "x", spec)
        assert next(deaths, None) is None
        for version in versions_in(medium.open(), "acme"):
            assert medium.open().verify(Ref("acme", "x", digest=version.digest)) == version
        assert garbage(medium) == []
