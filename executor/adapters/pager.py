"""The pager: loads adapters into host memory, says which stay there, and fills the slots as planned.

Everything here runs on the engine's thread, but for `load`, which runs on the loader's. A failed load is an
outcome for the sequences that wait for it. A retryable one is remembered for a short while that doubles with
every failure, so that a store in trouble is not asked at every dispatch; all others are forgotten at once.
"""

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol

from executor.adapters.backoff import Backoffs
from executor.adapters.drops import DropKey, Drops
from executor.adapters.host_tier import HostTier, ImageT
from executor.adapters.loader import Load, Loader
from executor.adapters.pins import Pins
from executor.adapters.residency import Copy, Residency, ResidencyDelta, Tier
from executor.batch.batcher import PageIn
from executor.batch.slots import SlotState, SlotTable
from executor.errors import AdapterLoadTimeout, HostMemoryFull
from executor.rejection import Rejection, rejection_of

MAX_HINTS = 256
_HINT_LIFE_S = 10.0  # after its time: nobody came

logger = logging.getLogger(__name__)


class Adapters(Protocol[ImageT]):
    """Where images come from and go to: `PooledAdapters` on one rank, `SpreadAdapters` over several.

    `nbytes_per_slot` is the most that one takes; host memory has room for `max_images` of that size, which
    may turn out to be fewer.

    slot_nbytes what an adapter with so many full heads takes in a slot
    load_image  reads and lays out an adapter, on a loader thread
    load        puts an image into a slot: the next step finds it there, and needs the image no more;
                `load_seconds` says what each load took that has ended since the last call
    forget      is told every loaded image that is given up
    make_room   gives room to running loads; `evict` lets go of one image that is not in `keep`, and says
                whether there was one
    """

    @property
    def nbytes_per_slot(self) -> int: ...
    @property
    def max_images(self) -> int: ...
    def slot_nbytes(self, num_full_heads: int) -> int: ...
    def load_image(self, digest: str) -> ImageT: ...
    def load(self, slot: int, image: ImageT) -> None: ...
    def clear(self, slot: int) -> None: ...
    def load_seconds(self) -> list[float]: ...
    def forget(self, image: ImageT) -> None: ...
    def make_room(self, keep: Container[str], evict: Callable[[], bool]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PagerSettings:
    host_bytes: int
    loader_threads: int
    load_timeout_s: float


@dataclass(frozen=True, slots=True)
class Listeners:
    wake: Callable[[], None]
    load_ended: Callable[[str, float], None]  # told "ok" or a rejection's reason, and seconds
    paged_in: Callable[[str], None]  # told the digest
    page_in_took: Callable[[float], None]  # told seconds


@dataclass(frozen=True, slots=True)
class _Hint:
    need_by: float
    uses: int  # expected


@dataclass(frozen=True, slots=True)
class LoadFailure:
    digest: str
    rejection: Rejection


class Pager(Generic[ImageT]):
    """`slots` is shared with the batcher, which assigns slots to sequences; the copies are made here.

    The host tier must hold one image at least (ValueError).
    """

    def __init__(
        self,
        adapters: Adapters[ImageT],
        slots: SlotTable,
        settings: PagerSettings,
        listeners: Listeners,
        discard_copy: Callable[[str], None] | None = None,
    ) -> None:
        """`discard_copy` frees what is kept of a version on this machine's disk, without waiting for it;
        `discarded` is to be called then. None: nothing is kept there."""
        host_bytes, least = settings.host_bytes, adapters.nbytes_per_slot
        if host_bytes < least:
            raise ValueError(f"{host_bytes} bytes of host memory hold no adapter of {least} bytes")
        self.host: HostTier[ImageT] = HostTier(host_bytes, least, adapters.forget)
        self._adapters = adapters
        self._slots = slots
        self._loader = Loader(adapters.load_image, settings.loader_threads, listeners.wake)
        self._load_timeout_s = settings.load_timeout_s
        self._listeners = listeners
        self._residency = Residency()
        self._on_disk: dict[str, Copy] = {}
        self._changed: set[str] = set()  # beside what slots and host tier have noted themselves
        self._users: Counter[str] = Counter()  # accepted sequences, by digest
        self._pins = Pins()
        self._drops = Drops(discard_copy)
        self._hints: dict[str, _Hint] = {}
        self._backoffs = Backoffs()
        self._keep: set[str] = set()  # digests that a waiting sequence or a pin needs in host memory now

    def acquire(self, digest: str) -> None:
        """One more accepted sequence wants this adapter, now or later."""
        self._users[digest] += 1

    def release(self, digest: str) -> None:
        self._users[digest] -= 1
        if self._users[digest] <= 0:
            del self._users[digest]
            if digest in self._drops:
                self._purge(digest)

    def prefetch(self, digest: str, need_by: float, uses: int = 1) -> None:
        """A hint: it is loaded into host memory if that pushes out nothing that is needed. What is needed
        first, by the clock of `collect`, is loaded first, of what is due already that with most expected
        uses, and all after what somebody waits for. Of too many the one needed last is forgotten. For a while
        it stays in host memory as if it had these uses already."""
        before = self._hints.get(digest)
        self._hints[digest] = _Hint(min(need_by, before.need_by) if before else need_by, uses)
        self.host.expect(digest, uses, need_by + _HINT_LIFE_S)
        if len(self._hints) > MAX_HINTS:
            del self._hints[max(self._hints, key=lambda each: self._hints[each].need_by)]

    def pin(self, digest: str, tier: Tier, adapter: str = "") -> None:
        """Load and keep until all adapters that pinned it unpin it, in the closest tier of their pins. What
        would leave no room for anything else is refused, in the log."""
        room = self._adapters.max_images
        if digest not in self._pins and len(self._pins) + 1 >= room:
            logger.warning("not pinned, host memory holds %d adapters", room, extra={"digest": digest})
            return
        in_slots = sum(kept is Tier.SLOT for other, kept in self._pins.items() if other != digest)
        if tier is Tier.SLOT and in_slots + 1 >= len(self._slots):
            logger.warning("pinned to host memory, the last slot stays free", extra={"digest": digest})
            tier = Tier.HOST
        self._drops.keep(digest)
        self._pins.set(digest, adapter, tier)
        self._release_slot(digest)

    def unpin(self, digest: str, adapter: str = "") -> None:
        self._pins.end(digest, adapter)
        self._release_slot(digest)

    def drop(self, digest: str, adapter: str = "", key: DropKey | None = None) -> None:
        """End this adapter's pin, all of them when it is "". Unless another pins it, free every copy as soon
        as no accepted sequence needs it, and what a load brings that is under way. `take_dropped` then has
        the key."""
        if adapter:
            self._pins.end(digest, adapter)
        else:
            self._pins.end_all(digest)
        self._release_slot(digest)
        if digest in self._pins:
            self._drops.keep(digest, key)
            return
        self._backoffs.clear(digest)
        self._hints.pop(digest, None)
        self._drops.add(digest, key)
        if not self._users[digest]:
            self._purge(digest)

    def discarded(self, digest: str) -> None:
        """Its copy on disk is gone, and `on_disk` was told so."""
        self._drops.discarded(digest)

    def take_dropped(self) -> tuple[DropKey, ...]:
        """The drops that are done since the last call: `take_delta` has what there is left."""
        return tuple(self._drops.take_done())

    def on_disk(self, copies: tuple[Copy, ...]) -> None:
        """What the cache on disk holds, for the reports: loads ask it by themselves."""
        before, self._on_disk = self._on_disk, {copy.digest: copy for copy in copies}
        self._changed.update(digest for digest, _ in before.items() ^ self._on_disk.items())

    def collect(self, wanted: list[str], now: float) -> list[LoadFailure]:
        """Take in finished loads and start new ones, for `wanted` (longest waiting first), pins and hints.

        Returns the failures that concern waiting sequences or pins.
        """
        for seconds in self._adapters.load_seconds():
            self._listeners.page_in_took(seconds)
        self.host.lapse(now)
        outcomes = self._loader.finished()
        failures = [failure for outcome in outcomes for failure in self._land(outcome, now)]
        for outcome in outcomes:
            if not self._users[outcome.digest]:
                self._drops.freed(outcome.digest)
        # Who waited for a failed one is about to be rejected: it is not asked for again.
        failed = {failure.digest for failure in failures}
        wanted = [digest for digest in wanted if digest not in failed]
        self._choose(wanted)
        self._adapters.make_room(self._keep, lambda: self.host.evict(self._keep))
        failures += self._start(wanted, now)
        self._place_pins()
        return failures

    def page_in(self, page_ins: Iterable[PageIn]) -> None:
        """Put host images into the slots that a plan assigned."""
        for page_in in page_ins:
            for slot in page_in.emptied:
                self._adapters.clear(slot)
            self._adapters.load(page_in.slot, self.host.use(page_in.digest))
            self._slots.loaded(page_in.slot)
            self._listeners.paged_in(page_in.digest)

    def abandon_loading(self) -> None:
        """After a failed step whose sequences have let go: empty the slots that may be half filled."""
        for slot in self._slots.digests.values():
            if self._slots.state(slot) is SlotState.LOADING:
                self._empty(slot)

    def take_delta(self) -> ResidencyDelta | None:
        """What changed since the last call."""
        changed = sorted(self._changed | self._slots.take_changed() | self.host.take_changed())
        self._changed = set()
        if not changed:
            return None
        return self._residency.update(changed, [copy for digest in changed for copy in self._copies(digest)])

    def _copies(self, digest: str) -> Iterator[Copy]:
        if digest in self._on_disk:
            yield self._on_disk[digest]
        if digest in self.host:
            pinned = self._pins.get(digest) is Tier.HOST
            yield Copy(digest, Tier.HOST, self.host.size(digest), pinned=pinned)
        if (slot := self._slots.find(digest)) is not None:
            nbytes = self._adapters.slot_nbytes(self._slots.heads(slot))
            yield Copy(digest, Tier.SLOT, nbytes, slot, self._slots.is_pinned(slot))

    def holds(self, digest: str) -> bool:
        """Whether there is a copy of it in host memory or a slot."""
        return digest in self.host or self._slots.find(digest) is not None

    @property
    def num_loading(self) -> int:
        return len(self._loader.in_flight)

    def free_slots(self) -> int:
        """Slots that no accepted sequence and no pin claims."""
        return max(0, len(self._slots) - len(self._users.keys() | self._slots.pinned))

    def close(self) -> None:
        self._loader.close()
        self._adapters.close()

    def check(self) -> None:
        """Raise RuntimeError when the books do not balance."""
        self.host.check()
        if any(count <= 0 for count in self._users.values()):
            raise RuntimeError(f"adapter users out of balance: {self._users}")

    def users(self) -> dict[str, int]:
        """Accepted sequences by digest (a copy)."""
        return dict(self._users)

    def _land(self, outcome: Load[ImageT], now: float) -> list[LoadFailure]:
        digest = outcome.digest
        if isinstance(outcome.error, HostMemoryFull):
            self._listeners.load_ended("HOST_MEMORY_FULL", outcome.seconds)
        elif outcome.error is not None:
            return self._fail(digest, outcome.error, outcome.seconds, now)
        elif outcome.result is not None:
            self._listeners.load_ended("ok", outcome.seconds)
            self._backoffs.clear(digest)
            self._take(digest, outcome.result)
        return []

    def _take(self, digest: str, image: ImageT) -> None:
        unwanted = digest in self._drops and not self._users[digest]
        if not unwanted and digest not in self.host and self.host.put(digest, image, self._keep):
            self._slots.forget_heads(self.host)  # of those that were evicted
            self._slots.set_heads(digest, image.num_full_heads)
            return
        # Nobody wants it any more, or there is no room for one that nobody waits for: its load was for
        # nothing.
        self._adapters.forget(image)

    def _fail(self, digest: str, error: Exception, seconds: float, now: float) -> list[LoadFailure]:
        rejection = rejection_of(error)
        self._listeners.load_ended(rejection.reason, seconds)
        logger.warning("adapter load failed: %s", rejection.message, extra={"digest": digest})
        if rejection.retryable:
            self._backoffs.failed(digest, rejection, now)
        else:
            self._backoffs.clear(digest)
            self._pins.end_all(digest)
        return [LoadFailure(digest, rejection)]

    def _choose(self, wanted: list[str]) -> None:
        """Pins, then the longest waiting, as far as all their images fit together: these are not evicted.
        Of the pins as many as leave room for one image more."""
        self._keep = set()
        size = 0
        pins = list(self._pins)[: max(0, self._adapters.max_images - 1)]
        for digest in dict.fromkeys([*pins, *wanted]):
            size += self.host.size(digest) if digest in self.host else self._adapters.nbytes_per_slot
            if self._keep and size > self.host.max_bytes:
                break
            self._keep.add(digest)

    def _start(self, wanted: list[str], now: float) -> list[LoadFailure]:
        failures = []
        for digest in dict.fromkeys([*self._pins, *wanted]):
            if digest not in self._keep or self._is_here(digest):
                continue
            rejection = self._backoffs.rejection(digest, now)
            if rejection is not None:
                if digest in self._users:
                    failures.append(LoadFailure(digest, rejection))
            elif now - self._loader.in_flight.get(digest, now) >= self._load_timeout_s:
                timeout = AdapterLoadTimeout(f"loading {digest} takes longer than {self._load_timeout_s} s")
                failures += self._fail(digest, timeout, self._load_timeout_s, now)
            else:
                self._loader.start(digest, now)
        self._start_hints(now)
        return failures

    def _start_hints(self, now: float) -> None:
        """Starts as many as there are idle threads: whoever begins to wait must not wait for hints, too."""

        def turn(digest: str) -> tuple[float, int]:
            hint = self._hints[digest]
            return max(hint.need_by, now), -hint.uses

        for digest in sorted(self._hints, key=turn):
            is_over = now > self._hints[digest].need_by + _HINT_LIFE_S
            if is_over or self._is_here(digest) or self._backoffs.rejection(digest, now) is not None:
                del self._hints[digest]
            elif self._loader.has_idle_thread:
                del self._hints[digest]
                self._loader.start(digest, now)

    def _is_here(self, digest: str) -> bool:
        """Where it is to be kept, or closer."""
        in_slot = self._slots.find(digest) is not None and self._pins.get(digest) is not Tier.HOST
        return digest in self.host or in_slot

    def _release_slot(self, digest: str) -> None:
        """Unless a pin keeps it there."""
        slot = self._slots.find(digest)
        if slot is not None and self._pins.get(digest) is not Tier.SLOT:
            self._slots.set_pinned(slot, False)
        self._changed.add(digest)

    def _place_pins(self) -> None:
        for digest, tier in self._pins.items():
            slot = self._slots.find(digest)
            if tier is Tier.SLOT and self._slots.needs_heads(digest):
                logger.warning("pinned to host memory: full heads stay free", extra={"digest": digest})
                self._pins.lower(digest)
                tier = Tier.HOST
                self._changed.add(digest)
            if tier is not Tier.SLOT or (slot is None and digest not in self.host):
                continue
            if slot is None:
                assigned = self._slots.assign(digest)
                if assigned is None:
                    continue
                slot = assigned.slot
                self.page_in([PageIn(slot, digest, assigned.evicted)])
            if not self._slots.is_pinned(slot):
                self._slots.set_pinned(slot, True)

    def _purge(self, digest: str) -> None:
        slot = self._slots.find(digest)
        if slot is not None:
            self._empty(slot)
        self.host.discard(digest)
        self._slots.set_heads(digest, 0)
        if digest not in self._loader.in_flight:
            self._drops.freed(digest)

    def _empty(self, slot: int) -> None:
        self._slots.empty(slot)
        self._adapters.clear(slot)
