"""Watchers hear of every change, whatever happens to notices and connections."""

import threading
from pathlib import Path

import pytest

from adapter_store import ModelSpec
from adapter_store.redis_store.store import RedisStore
from adapter_store.redis_store.url import RedisUrl
from adapter_store.watch import POLL_SECONDS
from tests.support.services.proxy import Proxy
from tests.support.stores.media import RedisMedium
from tests.support.stores.redis_server import RedisServer


class Ear:
    def __init__(self, store: RedisStore) -> None:
        self._heard = threading.Event()
        self.stop = store.watch(self._heard.set)

    def must_hear(self) -> None:
        assert self._heard.wait(60)
        self._heard.clear()


def test_a_watcher_survives_cut_connections_and_restarts(
    own_server: RedisServer, adapters: list[Path], spec: ModelSpec
) -> None:
    writer = RedisMedium(own_server, "watch").open()
    with Proxy(own_server.port) as proxy:
        reader = RedisStore(RedisUrl.parse(f"redis://127.0.0.1:{proxy.port}?namespace=watch"))
        ear = Ear(reader)
        writer.put(adapters[0], "acme", "x", spec)
        ear.must_hear()
        proxy.cut()
        writer.put(adapters[1], "acme", "x", spec)
        ear.must_hear()
        own_server.restart()
        writer.put(adapters[2], "acme", "x", spec)
        ear.must_hear()
        ear.stop()


def test_notices_are_not_needed(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = redis_medium.open()
    store._channel = "nobody speaks here"
    ear = Ear(store)
    redis_medium.open().put(adapters[0], "acme", "x", spec)
    ear.must_hear()
    ear.stop()


def test_notices_come_before_the_next_poll(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapter_store.watch.POLL_SECONDS", 3600.0)
    assert POLL_SECONDS <= 1
    ear = Ear(redis_medium.open())
    for folder in adapters:
        redis_medium.open().put(folder, "acme", "x", spec)
        ear.must_hear()
    ear.stop()


def test_a_flush_is_heard(own_server: RedisServer, adapters: list[Path], spec: ModelSpec) -> None:
    store = RedisMedium(own_server, "watch").open()
    store.put(adapters[0], "acme", "x", spec)
    before = store._metadata.changes()
    ear = Ear(store)
    with own_server.client() as client:
        client.flushall()
    ear.must_hear()
    store.put(adapters[0], "acme", "x", spec)
    ear.must_hear()
    assert store._metadata.changes() > before
    ear.stop()


def test_the_thread_for_notices_ends_with_the_last_watcher(redis_medium: RedisMedium) -> None:
    store = redis_medium.open()
    first, second = Ear(store), Ear(store)
    first.stop()
    assert store._notices is not None
    thread = store._notices._thread
    second.stop()
    thread.join(60)
    assert not thread.is_alive()
