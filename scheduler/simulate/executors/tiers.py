"""Host memory, disk and loads of a simulated executor, as executor/adapters does them. Pure.

A load reads an adapter from the disk cache, or from the store, into host memory; so many at a time. What is
needed by those that wait comes first, hints have the threads that are left.
"""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import log2

from scheduler.simulate.costs import LoadCost
from scheduler.simulate.executors.slots import HALF_LIFE, MAX_REMEMBERED, Popularity

MAX_HINTS = 256
MAX_EXPECTED = 256
HINT_LIFE_S = 10.0


class Host:
    """Adapters in host memory: the least used for its bytes goes first."""

    def __init__(self, max_bytes: int, largest: int, sizes: Mapping[str, int]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.changed: dict[str, None] = {}
        self._sizes = sizes
        self._images: dict[str, int] = {}  # With the number of each.
        self._expected: dict[str, tuple[int, float]] = {}  # So many uses, until when.
        self._entered: set[str] = set()  # And not used since.
        self._popularity = Popularity(HALF_LIFE * max(1, max_bytes // largest), MAX_REMEMBERED)
        # A heap by worth, then by who came first. What makes an image worth more is found out late.
        self._victims: list[tuple[float, int, str]] = []
        self._numbers = count()

    def __contains__(self, digest: object) -> bool:
        return digest in self._images

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def use(self, digest: str) -> None:
        """A page-in; entering counted as the first one."""
        if digest not in self._entered:
            self._count(digest)
        self._entered.discard(digest)
        self._expect_no_more(digest)

    @property
    def expects(self) -> bool:
        return bool(self._expected)

    def expect(self, digest: str, uses: int, until: float) -> None:
        """So many requests will come for it, about, whether it is here by now or not."""
        self._expected[digest] = uses, until
        if digest in self._images:  # There may have been more before.
            self._may_go(digest)
        if len(self._expected) > MAX_EXPECTED:
            self._expect_no_more(min(self._expected, key=lambda each: self._expected[each][1]))

    def lapse(self, now: float) -> None:
        """Nobody came for what was expected until now."""
        for digest in [each for each, (_, until) in self._expected.items() if until < now]:
            self._expect_no_more(digest)

    def _expect_no_more(self, digest: str) -> None:
        if self._expected.pop(digest, None) and digest in self._images:
            self._may_go(digest)

    def put(self, digest: str, keep: Container[str]) -> bool:
        """Whether there was room, others but those in `keep` evicted."""
        size = self._sizes[digest]
        if not self._make_room(size, keep):
            return False
        self._images[digest] = next(self._numbers)
        self.num_bytes += size
        self._entered.add(digest)
        self.changed[digest] = None
        self._count(digest)
        self._may_go(digest)
        return True

    def _make_room(self, size: int, keep: Container[str]) -> bool:
        """Evicts nobody where it is not enough."""
        freed, chosen, kept = 0, dict[str, None](), dict[str, None]()
        while self.num_bytes - freed + size > self.max_bytes and self._victims:
            bound, number, victim = heappop(self._victims)
            if self._images.get(victim) != number or victim in chosen or victim in kept:
                continue
            if self._worth(victim) > bound:
                self._may_go(victim)
            elif victim in keep:
                kept[victim] = None
            else:
                chosen[victim] = None
                freed += self._sizes[victim]
        fits = self.num_bytes - freed + size <= self.max_bytes
        for victim in kept if fits else kept | chosen:
            self._may_go(victim)
        for victim in chosen if fits else ():
            self._discard(victim)
        return fits

    def _may_go(self, digest: str) -> None:
        heappush(self._victims, (self._worth(digest), self._images[digest], digest))

    def _discard(self, digest: str) -> None:
        del self._images[digest]
        self._entered.discard(digest)
        self.num_bytes -= self._sizes[digest]
        self.changed[digest] = None

    def _count(self, digest: str) -> None:
        forgotten = self._popularity.use(digest)
        if forgotten is not None and forgotten in self._images:
            self._may_go(forgotten)

    def _worth(self, digest: str) -> float:
        expected, _ = self._expected.get(digest, (0, 0.0))
        return self._popularity.of(digest, expected) - log2(self._sizes[digest])


class Disk:
    """The local disk cache: the least recently read goes first."""

    def __init__(self, max_bytes: int, sizes: Mapping[str, int]) -> None:
        self.changed: dict[str, None] = {}
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes = sizes
        self._copies: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, digest: object) -> bool:
        return digest in self._copies

    def read(self, digest: str) -> None:
        """It was read from here, or came from the store and is kept."""
        if digest in self._copies:
            self._copies.move_to_end(digest)
            return
        if self._sizes[digest] > self._max_bytes:
            return
        self._copies[digest] = None
        self.changed[digest] = None
        self._num_bytes += self._sizes[digest]
        while self._num_bytes > self._max_bytes:
            gone, _ = self._copies.popitem(last=False)
            self.changed[gone] = None
            self._num_bytes -= self._sizes[gone]


@dataclass(slots=True)
class _Hint:
    need_by: float
    uses: int


class Loads:
    """Who is loaded, and when each load is over."""

    def __init__(
        self, host: Host, disk: Disk, cost: LoadCost, threads: int, sizes: Mapping[str, int]
    ) -> None:
        self.num_loads = 0
        self._host = host
        self._disk = disk
        self._cost = cost
        self._threads = threads
        self._sizes = sizes
        self._todo: deque[str] = deque()
        self._running: list[tuple[float, int, str]] = []
        self._in_flight: dict[str, None] = {}
        self._hints: dict[str, _Hint] = {}
        self._keep: set[str] = set()

    @property
    def next_end(self) -> float | None:
        """When the next load is over."""
        return self._running[0][0] if self._running else None

    def hint(self, digest: str, need_by: float, uses: int) -> None:
        before = self._hints.get(digest)
        self._hints[digest] = _Hint(min(need_by, before.need_by) if before else need_by, uses)
        self._host.expect(digest, uses, need_by + HINT_LIFE_S)
        if len(self._hints) > MAX_HINTS:
            del self._hints[max(self._hints, key=lambda each: self._hints[each].need_by)]

    def collect(self, wanted: list[str], is_in_slot: Container[str], now: float) -> None:
        """Takes in the loads that are over, and begins what is `wanted`, the longest waiting first."""
        if self._host.expects:
            self._host.lapse(now)
        if not wanted and not self._running and not self._hints:
            return
        ended = []
        while self._running and self._running[0][0] <= now:
            at, _, digest = heappop(self._running)
            ended.append(digest)
            self._begin(at)
        for digest in ended:
            del self._in_flight[digest]
            self._disk.read(digest)
            if digest not in self._host:
                self._host.put(digest, self._keep)
        self._choose(wanted)
        for digest in wanted:
            if digest in self._keep and digest not in self._host:
                self._start(digest, now)
        if self._hints:
            self._start_hints(is_in_slot, now)

    def _choose(self, wanted: list[str]) -> None:
        """The longest waiting, as far as all their images fit together, are not evicted."""
        self._keep, size = set(), 0
        for digest in wanted:
            size += self._sizes[digest]
            if self._keep and size > self._host.max_bytes:
                break
            self._keep.add(digest)

    def _start_hints(self, is_in_slot: Container[str], now: float) -> None:
        hints = self._hints
        for digest in sorted(hints, key=lambda each: (max(hints[each].need_by, now), -hints[each].uses)):
            is_here = digest in self._host or digest in is_in_slot
            if is_here or now > hints[digest].need_by + HINT_LIFE_S:
                del hints[digest]
            elif len(self._in_flight) < self._threads:
                del hints[digest]
                self._start(digest, now)

    def _start(self, digest: str, now: float) -> None:
        if digest not in self._in_flight:
            self._in_flight[digest] = None
            self._todo.append(digest)
            self._begin(now)

    def _begin(self, now: float) -> None:
        while self._todo and len(self._running) < self._threads:
            digest = self._todo.popleft()
            self.num_loads += 1
            cost = self._cost.disk if digest in self._disk else self._cost.store
            ends_at = now + cost.seconds(self._sizes[digest])
            heappush(self._running, (ends_at, self.num_loads, digest))
