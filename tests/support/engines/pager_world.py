"""A pager without a model: images are plain objects of a size, loads happen on its real threads."""

import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from executor.adapters.pager import Listeners, LoadFailure, Pager, PagerSettings
from executor.adapters.residency import Copy, Residency
from executor.batch.slots import SlotTable


@dataclass(frozen=True)
class Block:
    nbytes: int
    num_full_heads: int = 0


class Store:
    """What a load does, by digest: an error, a wait, or an image of 10 bytes. What is in the slots."""

    nbytes_per_slot = 10

    def __init__(self, max_images: int) -> None:
        self.max_images = max_images
        self.in_slots: dict[int, Block] = {}
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.heads: dict[str, int] = {}
        self.asked: list[str] = []
        self.loaded: list[Block] = []
        self.forgotten: list[Block] = []

    def slot_nbytes(self, num_full_heads: int) -> int:
        return 10 + 100 * num_full_heads

    def load(self, slot: int, image: Block) -> None:
        self.in_slots[slot] = image

    def clear(self, slot: int) -> None:
        del self.in_slots[slot]

    def load_seconds(self) -> list[float]:
        return []

    def forget(self, image: Block) -> None:
        self.forgotten.append(image)

    def make_room(self, keep: Container[str], evict: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass

    def load_image(self, digest: str) -> Block:
        self.asked.append(digest)
        if digest in self.gates:
            self.gates[digest].wait(30)
        if digest in self.errors:
            raise self.errors[digest]
        self.loaded.append(Block(10, self.heads.get(digest, 0)))
        return self.loaded[-1]


@dataclass
class World:
    store: Store
    pager: Pager[Block]
    slots: SlotTable
    paged_in: list[str]
    now: float = 0.0

    def settle(self, *wanted: str) -> list[LoadFailure]:
        """Collects until no load is under way; returns the failures."""
        failures = self.pager.collect(list(wanted), self.now)
        while self.pager.num_loading:
            time.sleep(0.001)
            failed = {failure.digest for failure in failures}
            failures += self.pager.collect([d for d in wanted if d not in failed], self.now)
        self.check()
        return failures

    def check(self) -> None:
        """Every image that was loaded is in host memory or was given up, in the pager's own books too."""
        self.pager.check()
        assert len(self.store.loaded) == len(self.store.forgotten) + len(list(self.pager.host))

    def copies(self) -> tuple[Copy, ...]:
        """Every copy, as the first delta tells them."""
        residency = Residency()
        delta = self.pager.take_delta()
        assert delta is not None
        residency.apply(delta)
        return residency.copies


def make_world(
    *, room: int = 3, slots: int = 2, heads: int = 0, discard_copy: Callable[[str], None] | None = None
) -> World:
    """Host memory for `room` images. The pager is to be closed."""
    store, table = Store(room), SlotTable(slots, heads)
    paged_in: list[str] = []
    pager = Pager(
        store,
        table,
        PagerSettings(10 * room, loader_threads=2, load_timeout_s=5.0),
        Listeners(lambda: None, lambda result, seconds: None, paged_in.append, lambda seconds: None),
        discard_copy,
    )
    return World(store, pager, table, paged_in)


Make = Callable[..., World]
