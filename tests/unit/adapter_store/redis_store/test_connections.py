"""Nobody ever gets the reply to somebody else's question, whatever interrupts whom."""

import dataclasses
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from adapter_store import CachedStore, DataLoss, ModelSpec, Ref, StoreUnavailable, Version
from adapter_store.redis_store.keys import seal, unseal
from adapter_store.redis_store.store import RedisStore
from adapter_store.redis_store.url import RedisUrl
from tests.support.adapters.peft import lora_pair, raw_adapter
from tests.support.services.proxy import Proxy
from tests.support.stores.media import RedisMedium, versions_in

ROUNDS = 200
Q_PROJ = "model.layers.0.self_attn.q_proj"


class Interrupted(BaseException):
    """What a signal handler raises in the middle of a call, as Ctrl-C does."""


@pytest.fixture
def versions(redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    store = redis_medium.open()
    return [store.put(folder, "acme", f"n{i}", spec) for i, folder in enumerate(adapters[:2])]


def behind(proxy: Proxy, medium: RedisMedium, timeout: float = 10) -> RedisStore:
    url = RedisUrl.parse(f"redis://127.0.0.1:{proxy.port}?namespace={medium.namespace}")
    return RedisStore(dataclasses.replace(url, timeout=timeout))


def read(store: RedisStore, version: Version, kind: int) -> None:
    """One of several ways to ask for a version; right, or an error."""
    ref = Ref("acme", version.name, alias="latest")
    if kind == 0:
        assert store.resolve(ref).manifest == version.manifest
    elif kind == 1:
        with store.open(version.digest) as weights:
            assert weights.manifest == version.manifest
    elif kind == 2:
        assert [v.name for v in versions_in(store, "acme", name=version.name)] == [version.name]
    else:
        changed = store.set_protected("acme", version.name, version.digest, not store.resolve(ref).protected)
        assert changed.manifest == version.manifest


class Interrupter:
    """Raises Interrupted in the main thread, wherever it is. `raised`: how often, also where nobody could see
    it: Python only writes down what is raised in a __del__."""

    def __init__(self) -> None:
        self.raised = 0
        # To ask a thread that runs already is one step: in the locks of Thread.start an exception does harm.
        self._delays: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def interrupt(self, delay_s: float) -> None:
        """Once, a while after this returned."""
        self._delays.put(delay_s)

    def stop(self) -> None:
        self._delays.put(None)
        self._thread.join()

    def handle(self, *_: object) -> None:
        self.raised += 1
        raise Interrupted

    def _send(self) -> None:
        while (delay_s := self._delays.get()) is not None:
            time.sleep(delay_s)
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    interrupter = Interrupter()
    old = signal.signal(signal.SIGUSR1, interrupter.handle)
    yield interrupter
    interrupter.stop()
    signal.signal(signal.SIGUSR1, old)


def test_calls_that_are_interrupted_at_any_moment(
    redis_medium: RedisMedium, versions: list[Version], interrupter: Interrupter
) -> None:
    """In pipelines and in waits for the disk, too: the next call never gets the answer to this one."""
    chance = random.Random(1)
    with Proxy(redis_medium.server.port, delay=lambda size: 0.004) as proxy:
        store = behind(proxy, redis_medium)
        for number in range(ROUNDS):
            first, second = versions if number % 2 else versions[::-1]
            with suppress(Interrupted):
                interrupter.interrupt(chance.uniform(0, 0.012))
                read(store, first, number % 4)
                while interrupter.raised == number:  # The call was faster, and the signal is still to come.
                    time.sleep(0.01)
            assert interrupter.raised == number + 1
            read(store, second, (number // 4) % 4)


def test_calls_that_run_into_a_timeout(redis_medium: RedisMedium, versions: list[Version]) -> None:
    """An answer that comes too late is never taken for that to the next call."""
    chance = random.Random(2)
    outcomes = {"right": 0, "unavailable": 0}

    def stall(size: int) -> float:
        return 0.25 if chance.random() < 0.25 else 0.0

    with Proxy(redis_medium.server.port, delay=stall) as proxy, ThreadPoolExecutor(8) as pool:
        store = None
        while store is None:
            try:
                store = behind(proxy, redis_medium, timeout=0.1)
            except StoreUnavailable:
                continue

        def ask(number: int) -> str:
            try:
                read(store, versions[number % 2], number % 3)
            except StoreUnavailable:
                return "unavailable"
            return "right"

        for outcome in pool.map(ask, range(ROUNDS)):
            outcomes[outcome] += 1
    assert outcomes["right"] > 0


def test_connections_that_are_cut_under_way(redis_medium: RedisMedium, versions: list[Version]) -> None:
    done = threading.Event()
    with Proxy(redis_medium.server.port) as proxy, ThreadPoolExecutor(5) as pool:
        store = behind(proxy, redis_medium)

        def cut() -> None:
            while not done.wait(0.02):
                proxy.cut()

        def ask(index: int) -> None:
            for number in range(ROUNDS // 8):
                try:
                    read(store, versions[(index + number) % 2], number % 3)
                except StoreUnavailable:
                    continue

        cutting = pool.submit(cut)
        asking = [pool.submit(ask, index) for index in range(4)]
        for each in asking:
            each.result()
        done.set()
        cutting.result()


def test_a_fetch_that_breaks_off_half_way_leaves_nothing_and_succeeds_later(
    redis_medium: RedisMedium, spec: ModelSpec, tmp_path: Path
) -> None:
    """What arrives in part is neither kept nor served."""
    folder = raw_adapter(tmp_path / "big", lora_pair(Q_PROJ, 64, 64, rank=40_000), r=40_000)
    version = redis_medium.open().put(folder, "acme", "big", spec)
    breaking, passed = threading.Event(), [0]

    def half_way(size: int) -> float:
        passed[0] += size
        if breaking.is_set() and passed[0] > version.manifest.num_bytes // 2:
            proxy.cut()
        return 0.0

    with Proxy(redis_medium.server.port, delay=half_way) as proxy:
        cache = CachedStore(behind(proxy, redis_medium), tmp_path / "cache", 1 << 30)
        passed[0] = 0
        breaking.set()
        with pytest.raises(StoreUnavailable):
            cache.open(version.digest)
        assert list((tmp_path / "cache" / "entries").iterdir()) == []
        assert list((tmp_path / "cache" / "tmp").iterdir()) == []
        breaking.clear()
        with cache.open(version.digest) as weights:
            assert weights.manifest == version.manifest
        assert len(list((tmp_path / "cache" / "entries").iterdir())) == 1


def test_a_lost_reply_does_not_make_a_change_twice(
    redis_medium: RedisMedium, versions: list[Version]
) -> None:
    """The change is made, its reply is not heard, it is sent again: still one move of the alias."""
    first = versions[0]
    drop = threading.Event()

    def lose(size: int) -> float:
        if drop.is_set():
            drop.clear()
            proxy.cut()
        return 0.0

    with Proxy(redis_medium.server.port, delay=lose) as proxy:
        store = behind(proxy, redis_medium)
        commit = store._metadata.commit

        def losing(*arguments: object, **options: object) -> object:
            drop.set()
            return commit(*arguments, **options)  # type: ignore[arg-type]

        store._metadata.commit = losing  # type: ignore[method-assign, assignment]
        for generation in range(1, 10):
            alias = store.set_alias("acme", first.name, "prod", first.digest, expected_generation=0)
            assert not drop.is_set()
            assert alias.generation == generation
            store.delete_alias("acme", first.name, "prod")


def test_values_are_bound_to_their_keys(redis_medium: RedisMedium, versions: list[Version]) -> None:
    """Each holds a hash of itself and its key."""
    keys, store = redis_medium.keys, redis_medium.open()
    with redis_medium.server.client() as client:
        client.copy(keys.record("acme", "n0"), keys.record("acme", "n1"), replace=True)
        client.copy(keys.blob(versions[0].digest), keys.blob(versions[1].digest), replace=True)
    with pytest.raises(DataLoss):
        store.resolve(Ref("acme", "n1", alias="latest"))
    with pytest.raises(DataLoss):
        store.open(versions[1].digest)
    store.open(versions[0].digest).close()


def test_chunks_are_bound_to_their_keys(redis_medium: RedisMedium, versions: list[Version]) -> None:
    store = redis_medium.open()
    a, b = (redis_medium.index(version.digest) for version in versions)
    keys = [redis_medium.keys.chunk(index.digest, index.upload, 0) for index in (a, b)]
    with redis_medium.server.client() as client:
        client.copy(keys[0], keys[1], replace=True)
    with pytest.raises(DataLoss):
        store.open(b.digest)


@pytest.mark.parametrize("body", ["", "é\n\0", "{}"])
def test_seals(body: str) -> None:
    assert unseal("key", seal("key", body)) == body
    for value in (seal("other", body), seal("key", body) + b"x", b"", seal("key", body)[1:]):
        with pytest.raises(DataLoss):
            unseal("key", value)
