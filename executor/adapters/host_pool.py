"""The allocator of host memory for adapters: one pool, pinned where a GPU copies from it.

Pinning takes time, so memory is pinned once, in large segments, in the background while the model loads, and
never for one adapter. Loader threads claim room and fill it; the engine's thread gives it out, since only it
knows what may be evicted for it.

Segments are cut into stripes, each as long as the largest image, and no image lies in two of them. So images
that may not be evicted, fewer than there are stripes, always leave one whole stripe to those that come.
"""

import logging
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from executor.adapters.extents import Extents
from executor.adapters.pinned_memory import pin, present_memory
from executor.errors import HostMemoryFull
from executor.lora.image import Buffer
from executor.start_log import start_part

SEGMENT_BYTES = 1 << 30
_ALIGNMENT = 4096  # so that copies from it start at a page

Item = TypeVar("Item")

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Region:
    """Room of one image. `copied` is behind the last copy from it that was enqueued."""

    array: Buffer
    stripe: int
    start: int
    size: int
    copied: torch.cuda.Event | None = None

    @property
    def is_idle(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


@dataclass(eq=False, slots=True)
class _Claim:
    digest: str
    nbytes: int
    region: Region | None = None
    answered: threading.Event = field(default_factory=threading.Event)


class HostPool:
    """`claim` belongs to loader threads, `release` to any, all else to the engine's. `wake` makes the engine
    call `serve`. `max_image_bytes` is the most that is claimed at once."""

    def __init__(
        self, max_bytes: int, max_image_bytes: int, wake: Callable[[], None], device: torch.device
    ) -> None:
        self._wake = wake
        self._device = device
        self._stripes: list[tuple[Tensor, Extents]] = []
        self._grown: SimpleQueue[Tensor | None] = SimpleQueue()  # None: nothing more comes
        self._claims: SimpleQueue[_Claim] = SimpleQueue()
        self._released: SimpleQueue[Region] = SimpleQueue()
        self._waiting: list[_Claim] = []
        self._copying: list[Region] = []  # released, but a copy from it is not over
        self._closed = threading.Event()
        self._stripe_bytes = _aligned(max_image_bytes)
        sizes = _segment_sizes(max_bytes, max_image_bytes)
        self._to_come = sum(_stripes(size, self._stripe_bytes) for size in sizes)
        if device.type == "cuda":
            threading.Thread(target=self._grow, args=(sizes,), name="host-pool", daemon=True).start()
        else:
            self._grow(sizes)

    @property
    def max_images(self) -> int:
        """The number of images of the largest size. Falls when memory cannot be had."""
        return len(self._stripes) + self._to_come

    def claim(self, digest: str, nbytes: int) -> Region:
        """Waits for room. HostMemoryFull when it would push out an adapter that is needed more."""
        claim = _Claim(digest, nbytes)
        self._claims.put(claim)
        if self._closed.is_set():  # nobody may look at claims any more
            claim.answered.set()
        self._wake()
        claim.answered.wait()
        if claim.region is None:
            raise HostMemoryFull(f"no room for {digest} beside what is needed more")
        return claim.region

    def release(self, region: Region) -> None:
        self._released.put(region)

    def serve(self, keep: Container[str], evict: Callable[[], bool]) -> None:
        """Answer claims. `evict` lets go of one image that is not in `keep`, and says whether there was one.

        A claim for something in `keep` waits for as long as it takes, any other is refused when nothing is
        left to evict.
        """
        self.take_in()
        self._waiting += _all(self._claims)
        self._take_back()
        self._waiting = [claim for claim in self._waiting if not self._answer(claim, keep, evict)]

    def take_in(self) -> None:
        """The memory that has come since the last call."""
        for memory in _all(self._grown):
            if memory is None:
                self._to_come = 0
                logger.error("host memory holds %d adapters of the largest size, no more", self.max_images)
                break
            stripes = _cut(memory, self._stripe_bytes)
            self._stripes += stripes
            self._to_come -= len(stripes)

    def close(self) -> None:
        self._closed.set()
        for claim in (*self._waiting, *_all(self._claims)):
            claim.answered.set()

    def check(self, regions: Iterable[Region]) -> None:
        """Raise RuntimeError unless these, and nothing else, take room."""
        self._take_back()
        used = sum(region.size for region in (*regions, *self._copying))
        taken = sum(extents.size - extents.num_free for _, extents in self._stripes)
        if used != taken:
            raise RuntimeError(f"host pool out of balance: {taken} bytes are taken, {used} used")

    def _answer(self, claim: _Claim, keep: Container[str], evict: Callable[[], bool]) -> bool:
        while (region := self._allocate(claim.nbytes)) is None:
            if self._to_come or self._copying:
                return False
            if not evict():
                if claim.digest in keep and not self._closed.is_set():
                    return False
                break
            self._take_back()
        claim.region = region
        claim.answered.set()
        return True

    def _allocate(self, nbytes: int) -> Region | None:
        size = _aligned(nbytes)
        for number, (memory, extents) in enumerate(self._stripes):
            start = extents.take(size)
            if start is not None:
                array: Buffer = memory.numpy()[start : start + nbytes]
                return Region(array, number, start, size)
        return None

    def _take_back(self) -> None:
        released = [*self._copying, *_all(self._released)]
        self._copying = [r for r in released if not r.is_idle]
        for region in released:
            if region not in self._copying:
                self._stripes[region.stripe][1].give(region.start, region.size)

    def _grow(self, sizes: Sequence[int]) -> None:
        with start_part("taking host memory for adapters, in segments", len(sizes)) as part:
            for size in sizes:
                if self._closed.is_set():
                    return
                memory = self._memory(size)
                self._grown.put(memory)
                self._wake()
                if memory is None:
                    return
                part.advance()

    def _memory(self, size: int) -> Tensor | None:
        """None where it cannot be had: claims must not wait for it, what is there is shared out."""
        try:
            if self._device.type != "cuda":
                return torch.empty(size, dtype=torch.uint8)
            memory = present_memory(size)
        except (OSError, RuntimeError) as error:
            logger.error("no more host memory for adapters, %d bytes cannot be had: %s", size, error)
            return None
        try:
            pin(memory, self._device)
        except RuntimeError as error:
            logger.error("cannot pin %d bytes, copies from there stop the engine: %s", size, error)
        return torch.from_numpy(memory)


def _cut(memory: Tensor, least: int) -> list[tuple[Tensor, Extents]]:
    """The memory as many stripes of `least` bytes as fit, which share out what is left over."""
    count = _stripes(len(memory), least)
    size = len(memory) // count // _ALIGNMENT * _ALIGNMENT
    return [(memory[number * size : (number + 1) * size], Extents(size)) for number in range(count)]


def _stripes(segment: int, least: int) -> int:
    return max(1, segment // least)


def _segment_sizes(max_bytes: int, max_image_bytes: int) -> list[int]:
    """Every segment takes an image; what is left over is no segment."""
    segment = max(SEGMENT_BYTES, _aligned(max_image_bytes))
    if max_bytes < segment:
        return [_aligned(max_bytes)]
    rest = max_bytes % segment
    return [segment] * (max_bytes // segment) + ([rest] if rest >= _aligned(max_image_bytes) else [])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _all(queue: "SimpleQueue[Item]") -> list[Item]:
    items = []
    try:
        while True:
            items.append(queue.get_nowait())
    except Empty:
        return items
