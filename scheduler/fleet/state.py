"""What the scheduler knows of one executor: its limits, its last report and what was sent since. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum

from scheduler.fleet.residency import BASE, Copy, Residency, Tier
from scheduler.fleet.usage import Usage


class Phase(IntEnum):
    """Same numbers as ExecutorState on the wire."""

    CONNECTING = 1
    READY = 2
    DRAINING = 3
    REFUSED = 4
    HUNG = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """What an executor's hello says it can hold."""

    max_model_len: int
    max_rank: int
    modules: frozenset[str]
    max_loras: int
    max_seats: int
    max_full_heads: int = 0
    tells_drops: bool = False  # when they are done

    def can_hold(self, max_rank: int, modules: frozenset[str], full_heads: int = 0) -> bool:
        """Whether a version fits one of its slots; the base model (rank 0, no modules) always does."""
        fits = max_rank <= self.max_rank and modules <= self.modules
        return fits and full_heads <= self.max_full_heads


@dataclass(frozen=True, slots=True)
class Report:
    """An executor's last word on its room. `received` is how many dispatches of this stream it covers."""

    free_seats: int = 0
    free_slots: int = 0
    free_kv_blocks: int = 0
    waiting: int = 0
    running: int = 0
    received: int = 0
    # (digest, since when on our clock) of what all schedulers' requests wait for there, for want of a slot:
    # the longest wait first. Empty, too, where an executor does not repeat it.
    cold: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class ExecutorState:
    """One executor, for one stream at a time: `reset` forgets what the last stream told.

    Room is what the last report says less what was sent after it. What ended since does not count as room
    before the next report, so we never promise more than the executor does.
    """

    address: str
    phase: Phase = Phase.CONNECTING
    detail: str = "not connected yet"
    cordoned: bool = False
    instance_id: str = ""
    limits: Limits | None = None
    residency: Residency = field(default_factory=Residency)
    report: Report = field(default_factory=Report)
    usage: Usage = field(default_factory=Usage)
    streams: int = 0  # that have ended
    dropping: dict[int, str] = field(default_factory=dict)  # Digests by number, of drops not done.
    _sent: int = 0
    _unreported: deque[tuple[int, str]] = field(
        default_factory=deque
    )  # (number, digest) past report.received.
    _running: dict[str, tuple[int, str]] = field(default_factory=dict)  # dispatch_id -> (number, digest).
    _claims: Counter[str] = field(default_factory=Counter)  # Unfinished dispatches by digest, none zero.

    @property
    def takes_requests(self) -> bool:
        return self.phase is Phase.READY and not self.cordoned

    @property
    def num_running(self) -> int:
        """Dispatches of ours that have not ended."""
        return len(self._running)

    @property
    def free_seats(self) -> int:
        """Room for more sequences."""
        return max(0, self.report.free_seats - len(self._unreported))

    @property
    def free_slots(self) -> int:
        """Slots that a version without a claim here could take."""
        known = {digest for number, digest in self._running.values() if number <= self.report.received}
        new = {digest for _, digest in self._unreported} - known - {BASE}
        return max(0, self.report.free_slots - len(new))

    def may_hold(self, digest: str) -> bool:
        """Whether it has told of a copy, or may still get one that a load brings which is under way."""
        return self.residency.tier(digest) > Tier.NOWHERE or digest in self.dropping.values()

    def claims(self, digest: str) -> int:
        """Unfinished dispatches of one version; above zero it has, or was promised, a slot."""
        return self._claims[digest]

    def claimed(self) -> frozenset[str]:
        """Versions with unfinished dispatches, without the base model."""
        return frozenset(self._claims) - {BASE}

    def dispatch_ids(self) -> list[str]:
        return list(self._running)

    def sent(self, dispatch_id: str, digest: str, now: float = 0.0) -> None:
        """Counts a dispatch that was written to the stream."""
        if digest != BASE:
            self.usage.used(digest, self.residency.tier(digest), now)
        self._sent += 1
        self._unreported.append((self._sent, digest))
        self._running[dispatch_id] = (self._sent, digest)
        self._claims[digest] += 1

    def ended(self, dispatch_id: str, now: float = 0.0) -> bool:
        """Forgets a dispatch. Whether it was one of ours and had not ended."""
        entry = self._running.pop(dispatch_id, None)
        if entry is None:
            return False
        digest = entry[1]
        self.usage.touched(digest, now)
        self._claims[digest] -= 1
        if not self._claims[digest]:
            del self._claims[digest]
            self.usage.given_up(digest)
        return True

    def moved(self, number: int, added: list[Copy], removed: list[tuple[str, Tier]], now: float) -> bool:
        """Takes a residency delta. False: one before it is missing."""
        for copy in added:
            if copy.tier is Tier.SLOT:
                self.usage.paged_in(copy.digest, now)
        return self.residency.apply(number, added, removed)

    def reported(self, report: Report) -> None:
        """Takes a newer report."""
        self.report = report
        while self._unreported and self._unreported[0][0] <= report.received:
            self._unreported.popleft()

    def reset(self) -> list[str]:
        """The stream ended: forgets everything it told, and returns the dispatches that ended with it.

        `phase` and `detail` are the caller's to set.
        """
        lost = list(self._running)
        self.limits, self.residency, self.report = None, Residency(), Report()
        self.streams += 1
        self.dropping.clear()
        self._sent = 0
        self._unreported.clear()
        self._running.clear()
        self._claims.clear()
        self.usage.interrupted()
        return lost

    def check(self) -> None:
        """Raises AssertionError when the counts disagree."""
        assert self._claims == Counter(digest for _, digest in self._running.values())
        assert all(count > 0 for count in self._claims.values())
        numbers = [number for number, _ in self._unreported]
        assert numbers == list(range(self._sent - len(numbers) + 1, self._sent + 1))
        self.residency.check()
