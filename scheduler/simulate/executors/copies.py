"""What a simulated executor has told of its copies, and what changed since. Pure."""

from collections.abc import Mapping

from scheduler.fleet.residency import Copy, Tier
from scheduler.simulate.executors.slots import Slots
from scheduler.simulate.executors.tiers import Disk, Host

Delta = tuple[int, list[Copy], list[tuple[str, Tier]]]
"""Its number, what was added, and what was removed."""


class Copies:
    """Numbers its deltas from 1 on."""

    def __init__(self, slots: Slots, host: Host, disk: Disk, sizes: Mapping[str, int]) -> None:
        self.number = 0  # Of the last delta.
        self._slots = slots
        self._host = host
        self._disk = disk
        self._sizes = sizes
        self._told: dict[tuple[str, Tier], Copy] = {}

    @property
    def told(self) -> list[Copy]:
        """All that is there by what was told: a snapshot."""
        return list(self._told.values())

    def take_delta(self) -> Delta | None:
        """What changed since the last call."""
        changes = (self._slots.changed, self._host.changed, self._disk.changed)
        if not any(changes):
            return None
        changed = sorted({*changes[0], *changes[1], *changes[2]})
        for change in changes:
            change.clear()
        added, removed = list[Copy](), list[tuple[str, Tier]]()
        for digest in changed:
            there = self._copies_of(digest)
            for tier in (Tier.DISK, Tier.HOST, Tier.SLOT):
                before, after = self._told.get((digest, tier)), there.get(tier)
                if after is None and before is not None:
                    del self._told[digest, tier]
                    removed.append((digest, tier))
                elif after is not None and after != before:
                    self._told[digest, tier] = after
                    added.append(after)
        if not added and not removed:
            return None
        self.number += 1
        return self.number, added, removed

    def _copies_of(self, digest: str) -> dict[Tier, Copy]:
        found, size = dict[Tier, Copy](), self._sizes[digest]
        if digest in self._disk:
            found[Tier.DISK] = Copy(digest, Tier.DISK, 0, size, False)
        if digest in self._host:
            found[Tier.HOST] = Copy(digest, Tier.HOST, 0, size, False)
        if (slot := self._slots.find(digest)) is not None:
            found[Tier.SLOT] = Copy(digest, Tier.SLOT, slot, size, False)
        return found
