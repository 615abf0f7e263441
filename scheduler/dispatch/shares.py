"""Who has been served how much: virtual tokens by name. Pure.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024: tokens spent move a counter forward, the
lowest goes first. Who comes, or comes back, starts no lower than the lowest of those that wait and can make
progress: nobody saves anything up by being away.

What fleets add to that paper is that not everybody can run everywhere.

- Who waits for something that it cannot have, as a slot, is as good as away: it holds the start of others
  down no more, and when its turn comes it starts where they are. Else those who come after it would start at
  its old counter, and hold up for all its wait those who were served meanwhile.
- A high counter of who alone can run somewhere is no measure of those who cannot: they start at the lowest.
- And the lowest may be low because it gets little where it alone can run. So who comes starts, with its first
  turn, where the last one did that was served at the same place: it has one turn before it is their equal.

Whoever always has something waiting that can run is never moved but by what is spent for it. So two such
that can run at the same places stay within what a turn costs and what runs, whoever else comes and goes.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

MIN_KEPT = 64
LOOK_EVERY = 16  # Turns: after so many it is noticed at the latest that the lowest is blocked.
MAX_PLACES = 1024  # Of which is known where the last one was served.


@dataclass(slots=True)
class Shares:
    """`can_progress` says of a name whether something waits under it that may be served before long.

    Counters only grow while somebody waits under their name, so a former value is a lower bound.
    """

    can_progress: Callable[[str], bool]
    counters: dict[str, float] = field(default_factory=dict)  # For reading; whoever waits is here.
    _lowest: list[tuple[float, str]] = field(default_factory=list)  # A heap of lower bounds, one a name.
    _counted: set[str] = field(default_factory=set)  # Names in it. Left-overs go when they come up.
    _new: set[str] = field(default_factory=set)  # They came, and were not served since.
    _last: float = 0.0  # The turn that was served last.
    _turns: int = 0  # That were served.
    _places: dict[str, float] = field(default_factory=dict)  # The turn that was served last at each.
    _kept: int = MIN_KEPT

    def of(self, name: str) -> float:
        """The name's virtual tokens; of one that is not known, where it would start."""
        counter = self.counters.get(name)
        return self.floor() if counter is None else counter

    def enter(self, name: str) -> None:
        """The name has something that waits again."""
        self.counters[name] = max(self.counters.get(name, 0.0), self.floor())
        self._new.add(name)
        self._count(name)

    def floor(self, served: str = "") -> float:
        """The lowest counter of those that wait and can make progress, as `served` does; without any, the
        turn that was served last."""
        lowest, counters = self._lowest, self.counters
        while lowest:
            entered, name = lowest[0]
            counter = counters[name]
            if counter != entered:
                heapreplace(lowest, (counter, name))
            elif name == served or self.can_progress(name):
                return entered
            else:
                heappop(lowest)
                self._counted.discard(name)  # Until it is served.
        return self._last

    def serve(self, name: str, paid: float = 0.0, place: str = "") -> None:
        """The name's turn is served, of which so much was charged before. `place` is where, or "" for a turn
        that was not the fairest there."""
        counter = self.counters[name]
        if name in self._new or name not in self._counted:
            self._new.discard(name)
            counter = self.counters[name] = max(counter, self.floor(), self._places.get(place, 0.0))
            self._count(name)
        self._last = counter - paid
        self._turns += 1
        if not self._turns % LOOK_EVERY:
            self.floor(served=name)
        if place:
            self._places[place] = self._last
            if len(self._places) > MAX_PLACES:
                self._places.clear()

    def charge(self, name: str, tokens: float) -> None:
        self.counters[name] = self.of(name) + tokens

    def __contains__(self, name: str) -> bool:
        return name in self.counters

    @property
    def has_many(self) -> bool:
        """Time to forget: there are twice as many counters as were kept the last time."""
        return len(self.counters) > 2 * self._kept

    def forget_all_but(self, waiting: Container[str]) -> None:
        """Drops counters of others that would start at the floor anyway."""
        floor = self.floor()
        self.counters = {
            name: count for name, count in self.counters.items() if name in waiting or count > floor
        }
        self._new = {name for name in self._new if name in waiting}
        self._counted = {name for name in self._counted if name in waiting}
        self._lowest = [(self.counters[name], name) for name in self._counted]
        heapify(self._lowest)
        self._kept = max(MIN_KEPT, len(self.counters))

    def _count(self, name: str) -> None:
        if name not in self._counted:
            self._counted.add(name)
            heappush(self._lowest, (self.counters[name], name))
