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


@dataclass(slots=True, eq=False)
class Share:
    """What was spent under one name. Only grows while somebody waits under it."""

    name: str
    tokens: float
    is_new: bool = False  # It came or was blocked, and was not served since.
    is_counted: bool = False  # Among those of which the lowest is looked for.


@dataclass(slots=True)
class Shares:
    """`can_progress` says of a name whether something waits under it that may be served before long."""

    can_progress: Callable[[str], bool]
    _shares: dict[str, Share] = field(default_factory=dict)  # Whoever waits is here.
    # A heap of lower bounds, one for each that is counted. Left-overs go when they come up.
    _lowest: list[tuple[float, str, Share]] = field(default_factory=list)
    _last: float = 0.0  # The turn that was served last.
    _turns: int = 0  # That were served.
    _places: dict[str, float] = field(default_factory=dict)  # The turn that was served last at each.
    _kept: int = MIN_KEPT

    def of(self, name: str) -> float:
        """The name's virtual tokens; of one that is not known, where it would start."""
        share = self._shares.get(name)
        return self.floor() if share is None else share.tokens

    def enter(self, name: str) -> Share:
        """The name has something that waits again. Its share stays the same while that waits."""
        share, floor = self._shares.get(name), self.floor()
        if share is None:
            share = self._shares[name] = Share(name, floor)
        share.tokens = max(share.tokens, floor)
        share.is_new = True
        self._count(share)
        return share

    def floor(self, served: Share | None = None) -> float:
        """The lowest of those that wait and can make progress, as `served` does; without any, the turn that
        was served last."""
        lowest = self._lowest
        while lowest:
            entered, name, share = lowest[0]
            if share.tokens != entered:
                heapreplace(lowest, (share.tokens, name, share))
            elif share is served or self.can_progress(name):
                return entered
            else:
                heappop(lowest)
                share.is_counted, share.is_new = False, True
        return self._last

    def serve(self, share: Share, tokens: float, paid: float = 0.0, place: str = "") -> None:
        """Its turn is served and charged, of which so much was charged before. `place` is where, or "" for a
        turn that was not the fairest there."""
        if share.is_new:
            share.tokens = max(share.tokens, self.floor(), self._places.get(place, 0.0))
            share.is_new = False
            self._count(share)
        self._last = share.tokens - paid
        self._turns += 1
        if not self._turns % LOOK_EVERY:
            self.floor(served=share)
        share.tokens += tokens
        if place and len(self._shares) > 1:  # Where one is alone, others start no lower anyway.
            self._places[place] = self._last
            if len(self._places) > MAX_PLACES:
                self._places.clear()

    def charge(self, name: str, tokens: float) -> None:
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name, self.floor())
        share.tokens += tokens

    def __contains__(self, name: str) -> bool:
        return name in self._shares

    @property
    def has_many(self) -> bool:
        """Time to forget: there are twice as many shares as were kept the last time."""
        return len(self._shares) > 2 * self._kept

    def forget_all_but(self, waiting: Container[str]) -> None:
        """Drops shares of others that would start at the floor anyway."""
        floor = self.floor()
        kept = [share for share in self._shares.values() if share.name in waiting or share.tokens > floor]
        for share in kept:
            share.is_counted = share.is_counted and share.name in waiting
        self._shares = {share.name: share for share in kept}
        self._lowest = [(share.tokens, share.name, share) for share in kept if share.is_counted]
        heapify(self._lowest)
        self._kept = max(MIN_KEPT, len(kept))

    def _count(self, share: Share) -> None:
        if not share.is_counted:
            share.is_counted = True
            heappush(self._lowest, (share.tokens, share.name, share))
