"""Watchers hear of changes, whoever makes them."""

import threading
from pathlib import Path

from adapter_store import (
    AdapterStore,
    ModelSpec,
)
from tests.support.stores.media import Medium


def test_watchers_hear_of_changes_by_other_stores(
    store: AdapterStore, adapters: list[Path], spec: ModelSpec, medium: Medium
) -> None:
    heard = threading.Event()
    stop = store.watch(heard.set)
    assert not heard.is_set()
    medium.open().put(adapters[0], "acme", "x", spec)
    assert heard.wait(60)
    heard.clear()
    store.put(adapters[0], "acme", "x", spec)  # changes nothing
    stop()
    store.put(adapters[1], "acme", "x", spec)
    assert not heard.is_set()


def test_a_failing_watcher_keeps_watching(store: AdapterStore, adapters: list[Path], spec: ModelSpec) -> None:
    calls = threading.Semaphore(0)

    def fail() -> None:
        calls.release()
        raise RuntimeError("a bug in the callback")

    stop = store.watch(fail)
    for folder in adapters[:2]:
        store.put(folder, "acme", "x", spec)
        assert calls.acquire(timeout=60)
    stop()
