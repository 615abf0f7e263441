"""Which adapter is in which slot, and which one leaves for another. Pure: the pager fills the slots.

Of the slots that nothing runs on, an empty one is taken first, then that of the least popular adapter, by
decayed counts of its uses (`Popularity`), those before it had a slot included; one that somebody waits for
goes last. Every victim frees one slot, and what a miss costs is the wait, whatever the rank: so sizes do not
count here, as they do in host memory.

Some adapters need full heads (fully trained lm_head, embed_tokens), too, which are few. They hold them for as
long as they hold their slot: an adapter without users gives up both.
"""

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from executor.batch.popularity import Popularity

# By Zipf 1.0 over 1,000 adapters, beside the least recently used: 23 % fewer page-ins at 32 slots and 24 % at
# 128, where a table that knows the popularities has 25 and 27. Longer half-lives win 1 % more, and lose 5 %
# where the popular ones change.
_HALF_LIFE = 16  # uses, for each slot
_MAX_REMEMBERED = 4096  # versions, beside those that have a slot


class SlotState(Enum):
    EMPTY = "empty"
    LOADING = "loading"  # assigned; its weights are not all there yet
    RESIDENT = "resident"


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.EMPTY
    digest: str = ""
    users: int = 0
    pinned: bool = False
    heads: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.users and not self.pinned


class Assigned(NamedTuple):
    """`evicted`: who had the slot ("" for nobody). `emptied`: other slots, which gave their heads."""

    slot: int
    evicted: str
    emptied: tuple[int, ...] = ()


class SlotTable:
    """Places for adapters, one place per digest. A slot with users is never reassigned or emptied."""

    def __init__(self, num_slots: int, num_heads: int = 0) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._num_heads = num_heads
        self._heads: dict[str, int] = {}  # that an adapter needs, if any
        self._by_digest: dict[str, int] = {}
        self._popularity = Popularity(_HALF_LIFE * num_slots, _MAX_REMEMBERED + num_slots)
        # What each step asks, so that it need not look through hundreds of slots.
        self._idle = set(range(num_slots))
        self._pinned: set[int] = set()
        self._in_use = 0
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, digest: str) -> int | None:
        return self._by_digest.get(digest)

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state

    def users(self, slot: int) -> int:
        return self._slots[slot].users

    def heads(self, slot: int) -> int:
        """Full heads that it holds."""
        return self._slots[slot].heads

    @property
    def digests(self) -> dict[str, int]:
        """digest -> slot of every slot that is not empty (a copy)."""
        return dict(self._by_digest)

    @property
    def pinned(self) -> frozenset[str]:
        return frozenset(self._slots[slot].digest for slot in self._pinned)

    def is_pinned(self, slot: int) -> bool:
        return self._slots[slot].pinned

    def take_changed(self) -> set[str]:
        """The adapters that got a slot, left one, or are pinned otherwise since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def in_use(self) -> int:
        return self._in_use

    def set_heads(self, digest: str, heads: int) -> None:
        """How many full heads this adapter needs, before it is assigned a slot; 0 to forget it."""
        if heads:
            self._heads[digest] = heads
        else:
            self._heads.pop(digest, None)

    def forget_heads(self, keep: Container[str]) -> None:
        """Of adapters that neither have a slot nor are in `keep`."""
        for digest in [each for each in self._heads if each not in keep and each not in self._by_digest]:
            del self._heads[digest]

    def needs_heads(self, digest: str) -> bool:
        return digest in self._heads

    def has_place(self, digest: str) -> bool:
        """Whether `assign` would find a slot for this digest now."""
        if digest in self._by_digest:
            return True
        return bool(self._victims(digest, ()) if digest in self._heads else self._idle)

    def assign(self, digest: str, awaited: Container[str] = ()) -> Assigned | None:
        """Put `digest`, which has no slot, into an empty slot, or that of the least popular adapter without
        users, as LOADING; with the heads that it needs. Those that are `awaited` leave only if all are.

        None when every slot is in use or pinned, or too many heads are.
        """
        victims = self._victims(digest, awaited)
        if not victims:
            return None
        evicted, *_ = [self.empty(victim) for victim in victims]
        slot, *emptied = victims
        heads = self._heads.get(digest, 0)
        self._slots[slot] = _Slot(SlotState.LOADING, digest, heads=heads)
        self._by_digest[digest] = slot
        self._changed.add(digest)
        return Assigned(slot, evicted, tuple(emptied))

    def loaded(self, slot: int) -> None:
        self._slots[slot].state = SlotState.RESIDENT

    def acquire(self, slot: int) -> None:
        """One more sequence runs on this slot."""
        self._slots[slot].users += 1
        self._in_use += self._slots[slot].users == 1
        self._idle.discard(slot)
        self._popularity.use(self._slots[slot].digest)

    def release(self, slot: int) -> None:
        if self._slots[slot].users == 0:
            raise RuntimeError(f"slot {slot} has no users to release")
        self._slots[slot].users -= 1
        self._in_use -= self._slots[slot].users == 0
        self._note_idle(slot)

    def empty(self, slot: int) -> str:
        """Forget what an unused slot holds, its pin too; returns that digest ("" when it was empty)."""
        old = self._slots[slot]
        if old.users:
            raise RuntimeError(f"slot {slot} still has {old.users} users")
        if old.state is not SlotState.EMPTY:
            del self._by_digest[old.digest]
            self._changed.add(old.digest)
        self._slots[slot] = _Slot()
        self._pinned.discard(slot)
        self._note_idle(slot)
        return old.digest

    def set_pinned(self, slot: int, pinned: bool) -> None:
        self._slots[slot].pinned = pinned
        self._changed.add(self._slots[slot].digest)
        (self._pinned.add if pinned else self._pinned.discard)(slot)
        self._note_idle(slot)

    def _victims(self, digest: str, awaited: Container[str]) -> list[int]:
        """The slot to take, then others whose heads are needed, too; none when that is not enough."""

        def worth(i: int) -> tuple[bool, bool, float, int]:
            slot = self._slots[i]
            is_there = slot.state is not SlotState.EMPTY
            return is_there, slot.digest in awaited, self._popularity.of(slot.digest), i

        heads = self._heads.get(digest, 0)
        missing = heads and heads + sum(slot.heads for slot in self._slots) - self._num_heads
        if missing <= 0:
            return [min(self._idle, key=worth)] if self._idle else []
        givers = []
        for i in sorted((i for i in self._idle if self._slots[i].heads), key=worth):
            if missing > 0:
                givers.append(i)
                missing -= self._slots[i].heads
        return [] if missing > 0 else givers

    def _note_idle(self, slot: int) -> None:
        (self._idle.add if self._slots[slot].is_idle else self._idle.discard)(slot)

    def check(self) -> None:
        """Raise RuntimeError unless digests and slots name each other and empty slots are blank."""
        named = {slot.digest: i for i, slot in enumerate(self._slots) if slot.state is not SlotState.EMPTY}
        blank = all(slot == _Slot() for slot in self._slots if slot.state is SlotState.EMPTY)
        heads = sum(slot.heads for slot in self._slots)
        counted = all(slot.users >= 0 for slot in self._slots) and heads <= self._num_heads
        idle = {i for i, slot in enumerate(self._slots) if slot.is_idle}
        pinned = {i for i, slot in enumerate(self._slots) if slot.pinned}
        noted = (idle, pinned, sum(slot.users > 0 for slot in self._slots))
        known = noted == (self._idle, self._pinned, self._in_use)
        if named != self._by_digest or not blank or not counted or not known:
            raise RuntimeError(f"slot table out of balance: {self._slots}, {self._by_digest}")
