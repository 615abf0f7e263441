"""Room for images in host memory, given out by one thread and claimed by others."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapter_store import LoRAModule
from executor.adapters.extents import Extents
from executor.adapters.host_pool import HostPool, Region, _Claim, _segment_sizes
from executor.adapters.pooled import PooledAdapters, PooledImage
from executor.adapters.slot_writer import SlotWriter
from executor.errors import HostMemoryFull
from executor.lora.errors import NonFiniteWeights, RankTooLarge
from executor.lora.layout import SlotLayout, SlotSlice
from tests.unit.executor.lora.adapters import make_adapter

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 9)), max_size=60))
def test_runs_never_overlap_and_join_again(steps: list[tuple[bool, int, int]]) -> None:
    extents, held = Extents(24), dict[int, int]()
    for take, size, which in steps:
        if take:
            start = extents.take(size)
            taken = {place for begin, length in held.items() for place in range(begin, begin + length)}
            gaps = "".join("x" if place in taken else " " for place in range(24)).split("x")
            assert (start is None) == (max(map(len, gaps)) < size)
            if start is not None:
                assert not taken & set(range(start, start + size)) and start + size <= 24
                held[start] = size
        elif held:
            start = sorted(held)[which % len(held)]
            extents.give(start, held.pop(start))
        assert extents.num_free == 24 - sum(held.values())
    for start, size in held.items():
        extents.give(start, size)
    assert extents.take(24) == 0


def test_what_is_given_back_twice_is_found() -> None:
    extents = Extents(10)
    extents.take(4)
    extents.give(0, 4)
    for start, size in ((0, 4), (2, 4), (8, 4)):
        with pytest.raises(RuntimeError, match="twice"):
            extents.give(start, size)


def test_segments_take_whole_images_and_stay_in_the_bound() -> None:
    gib = 1 << 30
    assert _segment_sizes(4 * gib + 5 * PAGE, 4 * PAGE) == [gib] * 4 + [5 * PAGE]
    assert _segment_sizes(4 * gib + 3 * PAGE, 4 * PAGE) == [gib] * 4
    assert _segment_sizes(5 * gib, gib + 1) == [gib + PAGE] * 4
    assert _segment_sizes(7 * PAGE, 4 * PAGE) == [7 * PAGE]


class Claims:
    """A pool of ten pages, and claims for it on threads; `images` are what could be evicted, oldest first."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.pool = HostPool(10 * PAGE, 10 * PAGE, self.woken.set, torch.device("cpu"))
        self.images: dict[str, Region] = {}
        self.refused: list[str] = []

    def claim(self, digest: str, pages: int) -> threading.Thread:
        def run() -> None:
            try:
                self.images[digest] = self.pool.claim(digest, pages * PAGE - 1)
            except HostMemoryFull:
                self.refused.append(digest)

        self.woken.clear()
        thread = threading.Thread(target=run)
        thread.start()
        assert self.woken.wait(60)
        return thread

    def serve(self, *keep: str) -> None:
        def evict() -> bool:
            digest = next((digest for digest in self.images if digest not in keep), None)
            if digest is not None:
                self.pool.release(self.images.pop(digest))
            return digest is not None

        self.pool.serve(keep, evict)

    def take(self, digest: str, pages: int, *keep: str) -> None:
        thread = self.claim(digest, pages)
        self.serve(*keep)
        thread.join(60)
        assert not thread.is_alive()
        self.pool.check(self.images.values())


@pytest.fixture
def claims() -> Iterator[Claims]:
    made = Claims()
    yield made
    made.pool.close()


def test_images_are_evicted_until_a_run_is_long_enough(claims: Claims) -> None:
    for number, digest in enumerate("abcde"):
        claims.take(digest, 2)
        claims.images[digest].array[:] = number
    claims.take("f", 3, "b")
    assert sorted(claims.images) == ["b", "e", "f"]  # a, c and d went: only then three pages lie together
    assert (claims.images["b"].array == 1).all() and (claims.images["e"].array == 4).all()
    assert len(claims.images["f"].array) == 3 * PAGE - 1


def test_who_is_not_needed_is_refused_rather_than_evict_who_is(claims: Claims) -> None:
    claims.take("a", 6)
    claims.take("hint", 6, "a")
    assert claims.refused == ["hint"] and sorted(claims.images) == ["a"]


def test_who_is_needed_waits_until_something_may_go(claims: Claims) -> None:
    claims.take("a", 6)
    thread = claims.claim("b", 6)
    claims.serve("a", "b")
    time.sleep(0.01)
    assert thread.is_alive()
    claims.serve("b")
    thread.join(60)
    assert sorted(claims.images) == ["b"]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_fewer_kept_images_than_stripes_leave_room_for_the_largest(steps: list[tuple[int, bool]]) -> None:
    """Images of all sizes come and go in an order that would leave holes; two of them are kept for ever."""
    pool = HostPool(12 * PAGE, 4 * PAGE, lambda: None, torch.device("cpu"))
    assert pool.max_images == 3
    images: dict[str, Region] = {}
    kept: set[str] = set()

    def evict() -> bool:
        digest = next((digest for digest in images if digest not in kept), None)
        if digest is not None:
            pool.release(images.pop(digest))
        return digest is not None

    for number, (pages, keep) in enumerate([*steps, (4, False)]):
        digest = str(number)
        claim = _Claim(digest, pages * PAGE)
        pool._claims.put(claim)
        pool.serve(kept | {digest}, evict)
        assert claim.region is not None
        images[digest] = claim.region
        if keep and len(kept) < 2:
            kept.add(digest)
        pool.check(images.values())
    pool.close()


class Copy:
    """An event on the device, as far as the pool looks at it."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def test_room_is_not_reused_while_it_is_copied_from(claims: Claims) -> None:
    claims.take("a", 6)
    copy = Copy()
    claims.images["a"].copied = copy  # type: ignore[assignment]
    thread = claims.claim("b", 6)
    claims.serve("b")
    time.sleep(0.01)
    assert thread.is_alive() and not claims.images
    copy.over = True
    claims.serve("b")
    thread.join(60)
    assert sorted(claims.images) == ["b"]
    claims.pool.check(claims.images.values())


def test_closing_ends_the_claims_that_wait(claims: Claims) -> None:
    claims.take("a", 6)
    threads = [claims.claim("b", 6)]
    claims.serve("a", "b")
    threads.append(claims.claim("c", 6))
    claims.pool.close()
    for thread in threads:
        thread.join(60)
    assert sorted(claims.refused) == ["b", "c"]


class Written:
    """A store with one adapter, in memory, that counts how often it was closed."""

    def __init__(self, modules: Mapping[str, LoRAModule]) -> None:
        self.modules = modules
        self.closed = 0

    def open(self, digest: str) -> Any:
        store = self

        class Opened(dict[str, LoRAModule]):
            full_heads: Mapping[str, Any] = {}

            def __enter__(self) -> "Opened":
                return self

            def __exit__(self, *error: object) -> None:
                store.closed += 1

        return Opened(self.modules)


def test_an_adapter_that_cannot_be_served_takes_no_room(claims: Claims) -> None:
    layout = SlotLayout((SlotSlice("layers.0.q_proj", 64, 32),), 4, torch.float16)
    adapter = make_adapter(layout, {"layers.0.q_proj": 4}, seed=1)
    wide = replace(layout, max_rank=8)
    module = adapter["layers.0.q_proj"]
    too_large = {module.name: replace(module, lora_b=module.lora_b * np.float32(1e6))}
    too_high = make_adapter(wide, {"layers.0.q_proj": 8}, seed=1)
    for modules, error in ((adapter, None), (too_large, NonFiniteWeights), (too_high, RankTooLarge)):
        store = Written(modules)
        adapters = PooledAdapters(store, layout, claims.pool, cast(SlotWriter, None))
        outcomes: list[object] = []

        def load(adapters: PooledAdapters = adapters, outcomes: list[object] = outcomes) -> None:
            try:
                outcomes.append(adapters.load_image("a"))
            except Exception as raised:
                outcomes.append(raised)

        thread = threading.Thread(target=load)
        thread.start()
        while thread.is_alive():
            claims.serve()
        [outcome] = outcomes
        if isinstance(outcome, PooledImage):
            claims.pool.check([outcome.region])
            adapters.forget(outcome)
        else:
            assert error is not None and isinstance(outcome, error)
        claims.pool.check([])
        assert store.closed == 1


def test_a_claim_after_the_end_is_refused(claims: Claims) -> None:
    claims.pool.close()
    claims.claim("late", 1).join(60)
    assert claims.refused == ["late"]


def test_memory_that_cannot_be_had_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.adapters.host_pool.SEGMENT_BYTES", 8 * PAGE)
    empty, sizes = torch.empty, [8 * PAGE]

    def first_alone(size: int, **kind: object) -> torch.Tensor:
        if size not in sizes:
            raise RuntimeError("out of memory")
        sizes.remove(size)
        return empty(size, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", first_alone)
        pool = HostPool(16 * PAGE, 8 * PAGE, lambda: None, torch.device("cpu"))
    assert pool.max_images == 2
    pool.take_in()
    assert pool.max_images == 1
    claimed: list[Region] = []
    evicted: list[Region] = []

    def evict() -> bool:
        if not claimed:
            return False
        evicted.append(claimed.pop())
        pool.release(evicted[-1])
        return True

    for digest in ("a", "b"):
        thread = threading.Thread(target=lambda name=digest: claimed.append(pool.claim(name, 8 * PAGE)))
        thread.daemon = True
        thread.start()
        deadline = time.monotonic() + 60
        while thread.is_alive() and time.monotonic() < deadline:
            pool.serve((digest,), evict)
            thread.join(0.01)
        assert not thread.is_alive()
    assert len(evicted) == 1
    pool.check(claimed)
    pool.close()
