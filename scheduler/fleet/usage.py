"""How one executor's copies were used by this scheduler: hits, page-in times, last uses. Pure."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from scheduler.fleet.residency import Tier

MAX_REMEMBERED = 8192
MEASURED = 64


@dataclass(slots=True)
class Usage:
    """`now` is on one monotonic clock in all calls, seconds. Outlives streams: it is about the address."""

    hits: list[int] = field(default_factory=lambda: [0] * len(Tier))  # Requests by their version's tier.
    page_ins: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED))  # Seconds.
    _waiting: dict[str, float] = field(default_factory=dict)  # Since when a cold version was needed.
    _last_use: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def used(self, digest: str, tier: Tier, now: float) -> None:
        """A request was sent for a version whose closest copy was in `tier`."""
        self.hits[tier] += 1
        if tier is not Tier.SLOT:
            self._waiting.setdefault(digest, now)

    def paged_in(self, digest: str, now: float) -> None:
        since = self._waiting.pop(digest, None)
        if since is not None:
            self.page_ins.append(now - since)

    def given_up(self, digest: str, now: float) -> None:
        """Nobody needs it any more: what pages it in later was not asked for by those who did."""
        self._waiting.pop(digest, None)
        self._last_use[digest] = now
        self._last_use.move_to_end(digest)
        if len(self._last_use) > MAX_REMEMBERED:
            self._last_use.popitem(last=False)

    def interrupted(self) -> None:
        """What was waited for will not be told any more."""
        self._waiting.clear()

    def last_use(self, digest: str) -> float | None:
        """When it was given up the last time; None when that was never, or long ago."""
        return self._last_use.get(digest)
