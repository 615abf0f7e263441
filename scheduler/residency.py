"""Which versions an executor holds, kept from its snapshot and numbered deltas. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum


class Tier(IntEnum):
    """Where a copy is; higher is closer to running. Same numbers as ResidencyTier on the wire."""

    NOWHERE = 0
    DISK = 1
    HOST = 2
    SLOT = 3


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a version."""

    digest: str
    tier: Tier
    slot: int  # For Tier.SLOT.
    num_bytes: int
    pinned: bool


@dataclass(slots=True)
class Residency:
    """Copies by digest and tier. After a lost delta it is wrong: the stream must be opened anew."""

    _number: int = 0
    _copies: dict[str, dict[Tier, Copy]] = field(default_factory=dict)

    @classmethod
    def from_snapshot(cls, number: int, copies: Iterable[Copy]) -> "Residency":
        residency = cls(number)
        for copy in copies:
            residency._copies.setdefault(copy.digest, {})[copy.tier] = copy
        return residency

    def apply(self, number: int, added: Iterable[Copy], removed: Iterable[tuple[str, Tier]]) -> bool:
        """Takes the next delta; False, and nothing changed, when one is missing before it."""
        if number != self._number + 1:
            return False
        self._number = number
        for digest, tier in removed:
            tiers = self._copies.get(digest, {})
            tiers.pop(tier, None)
            if not tiers:
                self._copies.pop(digest, None)
        for copy in added:
            self._copies.setdefault(copy.digest, {})[copy.tier] = copy
        return True

    def tier(self, digest: str) -> Tier:
        """The closest tier that holds the version."""
        return max(self._copies.get(digest, {}), default=Tier.NOWHERE)

    def copies(self) -> list[Copy]:
        """All copies, by digest and tier."""
        return [
            self._copies[digest][tier]
            for digest in sorted(self._copies)
            for tier in sorted(self._copies[digest])
        ]

    def in_slots(self) -> list[str]:
        """Versions in slots, sorted."""
        return sorted(digest for digest, tiers in self._copies.items() if Tier.SLOT in tiers)

    def check(self) -> None:
        """Raises AssertionError when an entry is filed wrongly or kept empty."""
        for digest, tiers in self._copies.items():
            assert tiers, digest
            assert all((copy.digest, copy.tier) == (digest, tier) for tier, copy in tiers.items())
