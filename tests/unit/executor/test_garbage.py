"""Garbage is looked for while nobody waits, what is kept is little, and nothing adds up."""

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from adapter_store import DiskStore
from lorafleet import garbage
from lorafleet.garbage import QuietCollector
from tests.support.engines.driver import PROMPTS, Driver, greedy
from tests.support.engines.executor_app import connected, dispatch, running


class Collections:
    """Full ones: how many there were, and what `state` was at each."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.state: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self.seen)

    def clear(self) -> None:
        self.seen.clear()


@pytest.fixture
def full_collections() -> Iterator[Collections]:
    """Python's own rule would often begin one."""
    found = Collections()

    def listen(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.seen.append(found.state())

    before = gc.get_threshold()
    gc.set_threshold(200, 2, 2)
    gc.callbacks.append(listen)
    yield found
    gc.callbacks.remove(listen)
    gc.set_threshold(*before)


async def test_no_stream_waits_for_a_full_collection_and_an_idle_executor_makes_one(
    tiny_base: Path, tiny_store: DiskStore, full_collections: Collections
) -> None:
    async with (
        running(tiny_base, tiny_store, num_kv_blocks=300) as app,
        connected(app) as scheduler,
    ):
        full_collections.state = lambda: "busy" if app._engine.stalled_s else "idle"
        full_collections.clear()
        names = [str(number) for number in range(8)]
        await scheduler.dispatch(*(dispatch(name, tokens=200) for name in names))
        await scheduler.ended(*names)
        async with asyncio.timeout(30):
            while not full_collections:
                await asyncio.sleep(0.05)
    assert set(full_collections.seen) == {"idle"}
    assert gc.get_threshold() == (200, 2, 2)
    assert gc.get_freeze_count() == 0


class Cycle:
    """As an exception and the frame that keeps it: no reference count ever frees it."""

    alive = 0

    def __init__(self) -> None:
        Cycle.alive += 1
        self.me = self

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_what_is_lost_in_cycles_is_bounded_where_no_moment_is_idle(
    full_collections: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "MOST_NEW_OBJECTS", 60_000)
    collector = QuietCollector()
    collector.start()
    try:
        full_collections.clear()
        kept: deque[Cycle] = deque(maxlen=5_000)  # for long enough to be found by no young collection
        most = 0
        for _ in range(180_000):
            kept.append(Cycle())
            most = max(most, Cycle.alive)
    finally:
        collector.stop()
    assert len(full_collections) >= 2
    assert most < 100_000
    kept.clear()
    gc.collect()
    assert Cycle.alive == 0


def objects_of(driver: Driver, names: range, digests: list[str]) -> int:
    """Those that the collector looks through, after so many requests."""
    driver.run(
        *(
            greedy(str(name), PROMPTS[name % 4], digest=digests[name % len(digests)], max_new_tokens=4)
            for name in names
        )
    )
    for told in (driver.tokens, driver.finished, driver.cached):
        told.clear()
    gc.collect()
    return len(gc.get_objects())


@pytest.fixture
def nothing_else() -> Iterator[None]:
    """Of what the tests before have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_an_adapter_in_host_memory_is_few_objects(
    make_engine: Callable[..., Driver], digests: list[str], strangers: list[str], nothing_else: None
) -> None:
    driver = make_engine()
    one = objects_of(driver, range(8), digests[:1])
    assert objects_of(driver, range(8, 23), strangers) - one < 20 * len(strangers)


def test_requests_leave_no_objects_behind(
    make_engine: Callable[..., Driver], digests: list[str], nothing_else: None
) -> None:
    driver = make_engine()
    few = objects_of(driver, range(15), digests[:3])
    for start in range(15, 75, 15):
        many = objects_of(driver, range(start, start + 15), digests[:3])
    assert many - few < 50
