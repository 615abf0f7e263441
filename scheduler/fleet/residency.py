"""Which copies an executor has told this scheduler of, by snapshot and numbered deltas. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from enum import IntEnum

BASE = ""
"""The digest of requests to the base model, which no executor keeps a copy for."""

MAX_COUNTED = 8192


class Tier(IntEnum):
    """Where a copy is; higher is closer to running. Same numbers as ResidencyTier on the wire."""

    NOWHERE = 0
    DISK = 1
    HOST = 2
    SLOT = 3

    __hash__ = int.__hash__  # That of enums is written in Python, and plans look much up by tier.


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a version."""

    digest: str
    tier: Tier
    slot: int  # For Tier.SLOT.
    num_bytes: int
    pinned: bool


@dataclass(slots=True)
class Comings:
    """How often a version came into one tier, and left it."""

    loads: int = 0
    evictions: int = 0


@dataclass(slots=True)
class Residency:
    """Copies by digest and tier. After a lost delta it is wrong: the stream must be opened anew."""

    _number: int = 0
    _copies: dict[str, dict[Tier, Copy]] = field(default_factory=dict)
    _slots: dict[str, bool] = field(default_factory=dict)  # In slots, the longest there first: if pinned.
    _comings: OrderedDict[tuple[str, Tier], Comings] = field(default_factory=OrderedDict)  # The last ones.

    @classmethod
    def from_snapshot(cls, number: int, copies: Iterable[Copy]) -> "Residency":
        residency = cls(number)
        for copy in sorted(copies, key=lambda copy: copy.digest):  # Every scheduler takes the same order.
            residency._add(copy)
        return residency

    def apply(self, number: int, added: Iterable[Copy], removed: Iterable[tuple[str, Tier]]) -> bool:
        """Takes the next delta; False, and nothing changed, when one is missing before it."""
        if number != self._number + 1:
            return False
        self._number = number
        for digest, tier in removed:
            tiers = self._copies.get(digest, {})
            if tiers.pop(tier, None):
                self._count(digest, tier).evictions += 1
            if tier is Tier.SLOT:
                self._slots.pop(digest, None)
            if not tiers:
                self._copies.pop(digest, None)
        for copy in added:
            self._add(copy)
        return True

    def digests(self) -> KeysView[str]:
        """Versions with a copy."""
        return self._copies.keys()

    def tier(self, digest: str) -> Tier:
        """The closest tier that holds the version."""
        if digest in self._slots:
            return Tier.SLOT
        return max(self._copies.get(digest, ()), default=Tier.NOWHERE)

    def comings(self, digest: str, tier: Tier) -> Comings:
        """Since the snapshot, whose copies count as loaded once. Of what went long ago nothing is known."""
        return self._comings.get((digest, tier), Comings())

    def copies_of(self, digest: str) -> list[Copy]:
        return list(self._copies.get(digest, {}).values())

    def keeps(self, digest: str) -> bool:
        """Whether one of its copies is pinned."""
        return any(copy.pinned for copy in self.copies_of(digest))

    def count(self, tier: Tier) -> int:
        """Copies in one tier."""
        return sum(tier in tiers for tiers in self._copies.values())

    def copies(self) -> list[Copy]:
        """All copies, by digest and tier."""
        return [
            self._copies[digest][tier]
            for digest in sorted(self._copies)
            for tier in sorted(self._copies[digest])
        ]

    def in_slots(self) -> list[str]:
        """Versions in slots, sorted."""
        return sorted(self._slots)

    def longest_in_slots(self) -> list[str]:
        """Versions in slots that nobody pinned, those that came first before the others."""
        return [digest for digest, pinned in self._slots.items() if not pinned]

    @property
    def num_in_slots(self) -> int:
        return len(self._slots)

    @property
    def num_pinned_in_slots(self) -> int:
        """Slots that their versions do not leave."""
        return sum(self._slots.values())

    def _add(self, copy: Copy) -> None:
        tiers = self._copies.setdefault(copy.digest, {})
        if copy.tier not in tiers:
            self._count(copy.digest, copy.tier).loads += 1
        tiers[copy.tier] = copy
        if copy.tier is Tier.SLOT:
            self._slots[copy.digest] = copy.pinned

    def _count(self, digest: str, tier: Tier) -> Comings:
        comings = self._comings.setdefault((digest, tier), Comings())
        self._comings.move_to_end((digest, tier))
        if len(self._comings) > MAX_COUNTED:
            self._comings.popitem(last=False)
        return comings

    def check(self) -> None:
        """Raises AssertionError when an entry is filed wrongly or kept empty."""
        for digest, tiers in self._copies.items():
            assert tiers, digest
            assert all((copy.digest, copy.tier) == (digest, tier) for tier, copy in tiers.items())
        in_slots = {digest: tiers[Tier.SLOT] for digest, tiers in self._copies.items() if Tier.SLOT in tiers}
        assert self._slots == {digest: copy.pinned for digest, copy in in_slots.items()}
