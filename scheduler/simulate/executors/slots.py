"""Which adapter is in which slot of a simulated executor, as executor/batch/slots.py decides it. Pure."""

from collections.abc import Container, Mapping
from math import inf, log2

HALF_LIFE = 16  # Uses, for each slot or image.
MAX_REMEMBERED = 4096  # Versions.
EMPTY = ""


class Popularity:
    """Counts of uses; a use weighs half after `half_life` others. They are logarithms as of the first use."""

    def __init__(self, half_life: float, max_versions: int) -> None:
        self._half_life = half_life
        self._max_versions = max_versions
        self._uses = 0
        self._weights: dict[str, float] = {}  # The least recently used first.

    def use(self, digest: str) -> str | None:
        """Who is forgotten for it."""
        self._uses += 1
        age = self._uses / self._half_life
        before = self._weights.pop(digest, -inf)
        self._weights[digest] = age + log2(2.0 ** (before - age) + 1.0)
        if len(self._weights) <= self._max_versions:
            return None
        forgotten = next(iter(self._weights))
        del self._weights[forgotten]
        return forgotten

    def of(self, digest: str, more: int = 0) -> float:
        """`more` uses are counted as if they were now."""
        weight = self._weights.get(digest, -inf)
        if not more:
            return weight
        age = self._uses / self._half_life
        return age + log2(2.0 ** (weight - age) + more)


class Slots:
    """An adapter has one slot at most, which is its own while somebody uses it."""

    def __init__(self, num_slots: int, ranks: Mapping[str, int]) -> None:
        """`ranks` by adapter."""
        self.used_rank = 0  # Of the adapters that somebody uses, together.
        self._ranks = ranks
        self._digests = [EMPTY] * num_slots
        self._users = [0] * num_slots
        self._by_digest: dict[str, int] = {}
        self._idle = set(range(num_slots))
        self._popularity = Popularity(HALF_LIFE * num_slots, MAX_REMEMBERED + num_slots)
        self.changed: dict[str, None] = {}  # They came or went; who reports it empties it.

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: object) -> bool:
        return digest in self._by_digest

    def find(self, digest: str) -> int | None:
        return self._by_digest.get(digest)

    def users(self, slot: int) -> int:
        return self._users[slot]

    @property
    def num_idle(self) -> int:
        """Slots that nobody uses, empty or not."""
        return len(self._idle)

    @property
    def num_empty(self) -> int:
        return len(self._digests) - len(self._by_digest)

    @property
    def num_used(self) -> int:
        return len(self._digests) - len(self._idle)

    @property
    def digests(self) -> dict[str, int]:
        """The slots by adapter, its slot (a copy)."""
        return dict(self._by_digest)

    def assign(self, digest: str, awaited: Container[str] = ()) -> tuple[int, str]:
        """The slot that it gets, one must be idle, and who had that before: an empty one, else that of the
        least popular adapter, of those that are `awaited` only when all are."""

        def worth(slot: int) -> tuple[bool, bool, float, int]:
            there = self._digests[slot]
            return there != EMPTY, there in awaited, self._popularity.of(there), slot

        slot = min(self._idle, key=worth)
        evicted = self._digests[slot]
        if evicted:
            del self._by_digest[evicted]
            self.changed[evicted] = None
        self._digests[slot] = digest
        self._by_digest[digest] = slot
        self.changed[digest] = None
        return slot, evicted

    def acquire(self, slot: int) -> None:
        self._users[slot] += 1
        if self._users[slot] == 1:
            self._idle.discard(slot)
            self.used_rank += self._ranks[self._digests[slot]]
        self._popularity.use(self._digests[slot])

    def release(self, slot: int) -> None:
        self._users[slot] -= 1
        if not self._users[slot]:
            self._idle.add(slot)
            self.used_rank -= self._ranks[self._digests[slot]]
