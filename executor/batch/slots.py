"""Which adapter is in which slot, and which one leaves for another. Pure: the pager fills the slots.

Some adapters need full heads (fully trained lm_head, embed_tokens), too, which are few. They hold them for as
long as they hold their slot: an adapter without users gives up both.
"""

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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
    last_use: int = 0
    heads: int = 0


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
        self._uses = 0

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
        return frozenset(slot.digest for slot in self._slots if slot.pinned)

    @property
    def in_use(self) -> int:
        return sum(slot.users > 0 for slot in self._slots)

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
        return digest in self._by_digest or bool(self._victims(digest))

    def assign(self, digest: str) -> Assigned | None:
        """Put `digest`, which has no slot, into an empty or the least recently used idle slot, as LOADING;
        with the heads that it needs.

        None when every slot is in use or pinned, or too many heads are.
        """
        victims = self._victims(digest)
        if not victims:
            return None
        evicted, *_ = [self.empty(victim) for victim in victims]
        slot, *emptied = victims
        heads = self._heads.get(digest, 0)
        self._slots[slot] = _Slot(SlotState.LOADING, digest, last_use=self._tick(), heads=heads)
        self._by_digest[digest] = slot
        return Assigned(slot, evicted, tuple(emptied))

    def loaded(self, slot: int) -> None:
        self._slots[slot].state = SlotState.RESIDENT

    def acquire(self, slot: int) -> None:
        """One more sequence runs on this slot."""
        self._slots[slot].users += 1
        self._slots[slot].last_use = self._tick()

    def release(self, slot: int) -> None:
        if self._slots[slot].users == 0:
            raise RuntimeError(f"slot {slot} has no users to release")
        self._slots[slot].users -= 1

    def empty(self, slot: int) -> str:
        """Forget what an unused slot holds, its pin too; returns that digest ("" when it was empty)."""
        old = self._slots[slot]
        if old.users:
            raise RuntimeError(f"slot {slot} still has {old.users} users")
        self._by_digest.pop(old.digest, None)
        self._slots[slot] = _Slot()
        return old.digest

    def set_pinned(self, slot: int, pinned: bool) -> None:
        self._slots[slot].pinned = pinned

    def _victims(self, digest: str) -> list[int]:
        """The slot to take, then others whose heads are needed, too; none when that is not enough."""
        idle = [i for i, slot in enumerate(self._slots) if not slot.users and not slot.pinned]
        # Empty slots have last_use 0, before every used one.
        idle.sort(key=lambda i: self._slots[i].last_use)
        missing = self._heads.get(digest, 0) + sum(slot.heads for slot in self._slots) - self._num_heads
        givers = []
        for i in idle if missing > 0 else ():
            if missing > 0 and self._slots[i].heads:
                givers.append(i)
                missing -= self._slots[i].heads
        return [] if missing > 0 else givers or idle[:1]

    def _tick(self) -> int:
        self._uses += 1
        return self._uses

    def check(self) -> None:
        """Raise RuntimeError unless digests and slots name each other and empty slots are blank."""
        named = {slot.digest: i for i, slot in enumerate(self._slots) if slot.state is not SlotState.EMPTY}
        blank = all(slot == _Slot() for slot in self._slots if slot.state is SlotState.EMPTY)
        heads = sum(slot.heads for slot in self._slots)
        counted = all(slot.users >= 0 for slot in self._slots) and heads <= self._num_heads
        if named != self._by_digest or not blank or not counted:
            raise RuntimeError(f"slot table out of balance: {self._slots}, {self._by_digest}")
