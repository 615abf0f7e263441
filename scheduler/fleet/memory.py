"""What is remembered of executors that left under a name of their own: they may come back. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from scheduler.fleet.residency import Tier

Pin = tuple[str, str]
"""(digest, adapter as "tenant/name")"""

MAX_REMEMBERED = 1024


@dataclass(slots=True)
class Kept:
    """What operators want of one executor. `unpinned` are pins that ended, and that it was not told of."""

    cordoned: bool = False
    pins: dict[Pin, Tier] = field(default_factory=dict)
    unpinned: dict[Pin, None] = field(default_factory=dict)

    def unpin(self, pin: Pin) -> None:
        """It is to be told when it is back, if it was pinned."""
        if self.pins.pop(pin, None) is not None:
            self.unpinned[pin] = None

    def ends(self, digest: str, adapter: str) -> list[Pin]:
        """Pins of a version that a drop for one adapter ("": for all) ends."""
        return [pin for pin in self.pins if pin[0] == digest and adapter in ("", pin[1])]


class Memory:
    """What is remembered by name, and of all executors: what is pinned everywhere is so on those that join
    later, too."""

    def __init__(self) -> None:
        self.everywhere: dict[Pin, Tier] = {}
        self._former: OrderedDict[str, Kept] = OrderedDict()

    def pinned(self) -> set[Pin]:
        """All pins, of those that left and of those to come."""
        return {pin for kept in self._former.values() for pin in kept.pins} | self.everywhere.keys()

    def left(self, name: str, kept: Kept) -> None:
        """The last ones are remembered, if there is something to remember."""
        if kept.cordoned or kept.pins or kept.unpinned:
            self._former[name] = kept
            self._former.move_to_end(name)
            if len(self._former) > MAX_REMEMBERED:
                self._former.popitem(last=False)

    def joins(self, name: str) -> Kept:
        """What it had when it left, and what is pinned everywhere by now."""
        kept = self._former.pop(name, Kept())
        kept.pins = {**self.everywhere, **kept.pins}
        return kept

    def pin(self, pin: Pin, tier: Tier) -> None:
        """Everywhere, on those that left as well."""
        self.everywhere[pin] = tier
        for kept in self._former.values():
            kept.pins[pin] = tier
            kept.unpinned.pop(pin, None)

    def unpin(self, pin: Pin) -> None:
        """Everywhere."""
        self.everywhere.pop(pin, None)
        for kept in self._former.values():
            kept.unpin(pin)

    def drop(self, digest: str, adapter: str) -> None:
        """Ends the pins of a version for one adapter ("": for all), everywhere."""
        for pin in Kept(pins=self.everywhere).ends(digest, adapter):
            del self.everywhere[pin]
        for kept in self._former.values():
            for pin in kept.ends(digest, adapter):
                kept.unpin(pin)
