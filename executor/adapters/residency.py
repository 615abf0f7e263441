"""Which copies this executor holds, told to schedulers as a snapshot and numbered deltas."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    DISK = "disk"
    HOST = "host"
    SLOT = "slot"


@dataclass(frozen=True, slots=True)
class Copy:
    digest: str
    tier: Tier
    num_bytes: int
    slot: int = 0  # of a copy in tier SLOT
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ResidencyDelta:
    """Difference number `number`; a changed copy is only in `added`."""

    number: int
    added: tuple[Copy, ...]
    removed: tuple[Copy, ...]


class Residency:
    """The copies as last told. Deltas have consecutive numbers from 1; the empty start is number 0."""

    def __init__(self) -> None:
        self.number = 0
        self._copies: dict[tuple[str, Tier], Copy] = {}

    @property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(self._copies.values())

    def update(self, digests: Iterable[str], copies: Iterable[Copy]) -> ResidencyDelta | None:
        """Take over all copies that there are now of these versions; returns what is new, None when nothing
        is."""
        current = {(copy.digest, copy.tier): copy for copy in copies}
        keys = [(digest, tier) for digest in digests for tier in Tier]
        before = {key: self._copies[key] for key in keys if key in self._copies}
        added = tuple(copy for key, copy in current.items() if before.get(key) != copy)
        removed = tuple(copy for key, copy in before.items() if key not in current)
        if not added and not removed:
            return None
        self.number += 1
        delta = ResidencyDelta(self.number, added, removed)
        self._take_over(delta)
        return delta

    def apply(self, delta: ResidencyDelta) -> None:
        """Follow another Residency. ValueError for a delta that is not the next one."""
        if delta.number != self.number + 1:
            raise ValueError(f"residency delta {delta.number} does not follow {self.number}")
        self.number = delta.number
        self._take_over(delta)

    def _take_over(self, delta: ResidencyDelta) -> None:
        for copy in delta.removed:
            del self._copies[copy.digest, copy.tier]
        for copy in delta.added:
            self._copies[copy.digest, copy.tier] = copy
