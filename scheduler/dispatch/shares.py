"""Who has been served how much: virtual tokens by name. Pure.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: tokens spent move a counter forward, the
lowest goes first. Who comes back starts no lower than where the last one was served: nobody saves anything up
by being away, and who waits long for a slot does not push back those who come meanwhile.
"""

from collections.abc import Container
from dataclasses import dataclass, field

MIN_KEPT = 64


@dataclass(slots=True)
class Shares:
    """Counters only grow while somebody waits under their name, so a former value is a lower bound."""

    counters: dict[str, float] = field(default_factory=dict)  # For reading; whoever waits is here.
    _floor: float = 0.0
    _kept: int = MIN_KEPT

    def of(self, name: str) -> float:
        return self.counters.get(name, self._floor)

    def enter(self, name: str) -> None:
        """The name has something that waits again."""
        self.counters[name] = max(self.counters.get(name, self._floor), self._floor)

    def serve(self, at: float) -> None:
        """The one whose turn was at this place of the counters is served."""
        self._floor = at

    def charge(self, name: str, tokens: float) -> None:
        self.counters[name] = self.counters.get(name, self._floor) + tokens

    def __contains__(self, name: str) -> bool:
        return name in self.counters

    @property
    def has_many(self) -> bool:
        """Time to forget: there are twice as many counters as were kept the last time."""
        return len(self.counters) > 2 * self._kept

    def forget_all_but(self, waiting: Container[str]) -> None:
        """Drops counters of others that would start at the floor anyway."""
        self.counters = {
            name: count for name, count in self.counters.items() if name in waiting or count > self._floor
        }
        self._kept = max(MIN_KEPT, len(self.counters))
