"""The primary changes: with and without losing the connection, while changes and reads go on."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from adapter_store import ModelSpec, Ref, StoreUnavailable
from adapter_store.redis_store import primary, scripts
from adapter_store.redis_store.primary import Command
from adapter_store.redis_store.store import RedisStore
from adapter_store.redis_store.url import RedisUrl
from tests.support.stores.garbage import garbage
from tests.support.stores.media import RedisMedium, versions_in
from tests.support.stores.redis_server import RedisServer

PATIENCE_S = 60.0
LATEST = Ref.parse("acme/x", "")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica, in step."""
    delay = ("--repl-diskless-sync-delay", "0")
    with RedisServer(tmp_path / "a", *delay) as first:
        replica = RedisServer(tmp_path / "b", *delay, "--replicaof", f"127.0.0.1 {first.port}")
        with replica as second:
            wait_linked(second)
            yield first, second


def wait_linked(replica: RedisServer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with replica.client() as client:
        while client.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def wait_same(primary: RedisServer, replica: RedisServer) -> None:
    """A link that is up may still have something to bring."""
    deadline = time.monotonic() + PATIENCE_S
    with primary.client() as one, replica.client() as two:
        while one.dbsize() != two.dbsize():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def wait_confirming(client: redis.Redis) -> None:
    """A server that took over another's data writes its file anew, and confirms nothing before."""
    deadline = time.monotonic() + PATIENCE_S
    client.set("any", "change")
    while client.execute_command("WAITAOF", 1, 0, 1000)[0] < 1:
        assert time.monotonic() < deadline


def swap(primary: RedisServer, replica: RedisServer) -> None:
    """As an orchestrator does it: in step, and no client is disconnected."""
    with primary.client() as old, replica.client() as new:
        old.execute_command("FAILOVER")
        deadline = time.monotonic() + PATIENCE_S
        while new.role()[0] != b"master" or old.role()[0] != b"slave":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    wait_linked(primary)


def store_of(*servers: RedisServer, options: str = "") -> RedisStore:
    nodes = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return RedisStore(RedisUrl.parse(f"redis://{nodes}?{options}"))


@pytest.mark.parametrize("known", ["first", "both", "replica"])
def test_roles_are_swapped_during_a_stream_of_changes(
    pair: tuple[RedisServer, RedisServer], adapters: list[Path], spec: ModelSpec, known: str
) -> None:
    """By command, without losing a connection."""
    first, second = pair
    store = store_of(*{"first": [first], "both": [first, second], "replica": [second]}[known])
    digests = [store.put(folder, "acme", "x", spec).digest for folder in adapters]
    done, failures = threading.Event(), list[Exception]()
    moves = [0]

    def move() -> None:
        while not done.is_set():
            try:
                alias = store.set_alias("acme", "x", "prod", digests[moves[0] % 3])
                assert alias.digest == store.resolve(Ref.parse("acme/x@prod", "")).digest
                moves[0] += 1
            except StoreUnavailable:
                continue
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=move)
    thread.start()
    for old, new in ((first, second), (second, first)):
        before = moves[0]
        swap(old, new)
        deadline = time.monotonic() + PATIENCE_S
        while moves[0] < before + 10 and not failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    done.set()
    thread.join()
    assert failures == []
    assert store.aliases("acme")[1].generation == moves[0]  # each acknowledged move counted once
    store.verify(LATEST)


def test_reads_leave_a_primary_that_became_a_replica(
    pair: tuple[RedisServer, RedisServer], adapters: list[Path], spec: ModelSpec
) -> None:
    """It still answers, with what it knew then: a version that it never heard of is not "deleted"."""
    first, second = pair
    store = store_of(first, second)
    store.put(adapters[0], "acme", "x", spec)
    swap(first, second)
    with first.client() as client:
        client.replicaof("127.0.0.1", "1")  # cut off: what follows does not reach it
    newer = store_of(second).put(adapters[1], "acme", "x", spec)
    assert store.resolve(LATEST) == newer
    with store.open(newer.digest) as weights:
        assert len(weights) == 1


def test_a_new_primary_takes_over_from_a_dead_one(
    pair: tuple[RedisServer, RedisServer], adapters: list[Path], spec: ModelSpec
) -> None:
    first, second = pair
    store = store_of(first, second, options="replicas=1")
    version = store.put(adapters[0], "acme", "x", spec)
    first.kill()
    with pytest.raises(StoreUnavailable):
        store.resolve(LATEST)
    with second.client() as client:
        client.replicaof("NO", "ONE")
    assert store.resolve(LATEST) == version
    store.verify(LATEST)


def test_what_no_replica_confirms_is_not_acknowledged(
    pair: tuple[RedisServer, RedisServer], adapters: list[Path], spec: ModelSpec
) -> None:
    first, second = pair
    store = store_of(first, options="replicas=1&timeout=4")
    version = store.put(adapters[0], "acme", "x", spec)
    second.kill()
    with pytest.raises(StoreUnavailable, match="did not confirm"):
        store.set_alias("acme", "x", "prod", version.digest)
    second.start()
    wait_linked(second)
    assert store.set_alias("acme", "x", "prod", version.digest).digest == version.digest


def test_a_primary_whose_data_are_another_s_between_the_check_of_chunks_and_the_commit(
    pair: tuple[RedisServer, RedisServer],
    adapters: list[Path],
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a replica for a moment, of a server where the chunks still expire; its connections stay
    open. What is published has chunks that stay."""
    first, second = pair
    store, medium = store_of(first, options="timeout=3"), RedisMedium(first, "lorafleet")
    old = store.put(adapters[0], "acme", "x", spec)
    talk, seen = primary._talk, list[str]()

    def change_data(connection: Any, commands: Sequence[Command]) -> list[Any]:
        if not seen and any(command[0] == "PERSIST" for command in commands):
            seen.append("check")
            wait_linked(second)
            wait_same(first, second)
            with second.client() as client:
                client.replicaof("NO", "ONE")  # From here on it hears nothing of the first.
        elif seen == ["check"] and any(scripts.COMMIT in command for command in commands):
            seen.append("commit")
            with first.client() as client:
                client.replicaof("127.0.0.1", str(second.port))
                wait_linked(first)
                client.replicaof("NO", "ONE")
                wait_confirming(client)
        return talk(connection, commands)

    monkeypatch.setattr(primary, "_talk", change_data)
    try:
        newer = store.put(adapters[1], "acme", "x", spec)
    except StoreUnavailable:  # the wait for what the former data had written
        assert versions_in(store, "acme") == [old]
        newer = store.put(adapters[1], "acme", "x", spec)
    assert seen == ["check", "commit"]
    assert garbage(medium) == []
    store.verify(LATEST)
    assert store.resolve(LATEST) == newer
