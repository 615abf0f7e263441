"""What the scheduler knows of one executor: its limits, its last report and what was sent since. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, KeysView
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

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
    """An executor's last word on its room. `received` is how many dispatches of this stream it covers.

    `cold` are the versions that wait for a slot there, as (digest, since), of all its schedulers, the oldest
    first; `since` is in seconds on our clock. It is empty from an executor that does not tell.
    """

    free_seats: int = 0
    free_slots: int = 0
    free_kv_blocks: int = 0
    waiting: int = 0
    running: int = 0
    received: int = 0
    cold: tuple[tuple[str, float], ...] = ()


class Watcher(Protocol):
    """Told of every change of an executor's state as it happens; `position` is the executor's among all."""

    def room_changed(self, position: int) -> None:
        """A dispatch was sent, or ended: it may have other seats and slots."""

    def state_changed(self, position: int) -> None:
        """It takes requests or takes none any more, or has reported."""

    def limits_changed(self, position: int) -> None: ...

    def claim_changed(self, position: int, digest: str, claimed: bool) -> None:
        """The first dispatch of a version was sent, or the last one ended."""

    def tenant_changed(self, position: int, tenant: str, present: bool) -> None:
        """The first dispatch of a tenant was sent, or the last one ended."""

    def copies_changed(self, position: int, digests: Iterable[str]) -> None:
        """Their closest copies may be elsewhere now."""


class _Sent(NamedTuple):  # One is made for each dispatch: cheaper than a frozen dataclass.
    """One unfinished dispatch."""

    number: int  # On its stream, from 1.
    digest: str
    tenant: str


class ExecutorState:
    """One executor, for one stream at a time: `reset` forgets what the last stream told.

    Room is what the last report says less what was sent after it. What ended since does not count as room
    before the next report, so we never promise more than the executor does.
    """

    def __init__(self, address: str, phase: Phase = Phase.CONNECTING) -> None:
        self.address = address
        self.detail = "not connected yet"
        self.instance_id = ""
        self.report = Report()
        self.usage = Usage()
        self.streams = 0  # that have ended
        self.dropping: dict[int, str] = {}  # Digests by number, of drops not done.
        self._phase = phase
        self._cordoned = False
        self._on_trial = False
        self._limits: Limits | None = None
        self._residency = Residency()
        self._sent = 0
        self._running: dict[str, _Sent] = {}  # By dispatch id.
        self._claims: Counter[str] = Counter()  # Unfinished dispatches by digest, none zero.
        self._tenants: Counter[str] = Counter()  # The same by tenant.
        # What the last report does not cover, by dispatch id, and how many of each version.
        self._unreported: deque[tuple[str, _Sent]] = deque()
        self._new: Counter[str] = Counter()
        self._known: Counter[str] = Counter()  # Of what it covers and what runs: how many of each version.
        self._promised: set[str] = set()  # Versions that need a slot that the report still counts as free.
        self._watcher: Watcher | None = None
        self._position = 0

    def watch(self, watcher: Watcher, position: int) -> None:
        """Tells one watcher of every change from now on."""
        self._watcher, self._position = watcher, position

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        self._tell_state()

    @property
    def cordoned(self) -> bool:
        return self._cordoned

    @cordoned.setter
    def cordoned(self, cordoned: bool) -> None:
        self._cordoned = cordoned
        self._tell_state()

    @property
    def on_trial(self) -> bool:
        """Closed to all but one, which may crash it."""
        return self._on_trial

    @on_trial.setter
    def on_trial(self, on_trial: bool) -> None:
        self._on_trial = on_trial
        self._tell_state()

    @property
    def limits(self) -> Limits | None:
        """None before the stream's hello."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits | None) -> None:
        self._limits = limits
        if self._watcher:
            self._watcher.limits_changed(self._position)

    @property
    def residency(self) -> Residency:
        """For reading: changes come through `moved`, or as a whole."""
        return self._residency

    @residency.setter
    def residency(self, residency: Residency) -> None:
        digests = self._residency.digests() | residency.digests()
        self._residency = residency
        if self._watcher:
            self._watcher.copies_changed(self._position, digests)

    @property
    def takes_requests(self) -> bool:
        return self._phase is Phase.READY and not self._cordoned and not self._on_trial

    @property
    def num_running(self) -> int:
        """Dispatches of ours that have not ended."""
        return len(self._running)

    @property
    def num_sent(self) -> int:
        """Dispatches on this stream so far, as executors count them in `Report.received`."""
        return self._sent

    @property
    def free_seats(self) -> int:
        """Room for more sequences."""
        return max(0, self.report.free_seats - len(self._unreported))

    @property
    def free_slots(self) -> int:
        """Slots that a version without a claim here could take."""
        return max(0, self.report.free_slots - len(self._promised))

    def may_hold(self, digest: str) -> bool:
        """Whether it has told of a copy, or may still get one that a load brings which is under way."""
        return self.residency.tier(digest) > Tier.NOWHERE or digest in self.dropping.values()

    def claims(self, digest: str) -> int:
        """Unfinished dispatches of one version; above zero it has, or was promised, a slot."""
        return self._claims[digest]

    def claimed(self) -> frozenset[str]:
        """Versions with unfinished dispatches, without the base model."""
        return frozenset(self._claims) - {BASE}

    def digests(self) -> KeysView[str]:
        """Versions with unfinished dispatches, the base model's empty digest among them."""
        return self._claims.keys()

    def tenants(self) -> KeysView[str]:
        """Tenants with unfinished dispatches."""
        return self._tenants.keys()

    def dispatch_ids(self) -> list[str]:
        return list(self._running)

    def sent(self, dispatch_id: str, digest: str, now: float = 0.0, tenant: str = "") -> None:
        """Counts a dispatch that is written to the stream."""
        if digest != BASE:
            self.usage.used(digest, self.residency.tier(digest), now)
        self._sent += 1
        entry = self._running[dispatch_id] = _Sent(self._sent, digest, tenant)
        self._unreported.append((dispatch_id, entry))
        if _add_one(self._new, digest):
            self._weigh(digest)
        first_claim = _add_one(self._claims, digest)
        first_of_tenant = _add_one(self._tenants, tenant)
        if self._watcher:
            if first_claim:
                self._watcher.claim_changed(self._position, digest, True)
            if first_of_tenant:
                self._watcher.tenant_changed(self._position, tenant, True)
            self._watcher.room_changed(self._position)

    def ended(self, dispatch_id: str, now: float = 0.0) -> bool:
        """Forgets a dispatch. Whether it was one of ours and had not ended."""
        entry = self._running.pop(dispatch_id, None)
        if entry is None:
            return False
        digest = entry.digest
        self.usage.touched(digest, now)
        if entry.number <= self._sent - len(self._unreported):
            _take_one(self._known, digest)
            self._weigh(digest)
        last_claim = _take_one(self._claims, digest)
        last_of_tenant = _take_one(self._tenants, entry.tenant)
        if last_claim:
            self.usage.given_up(digest)
        if self._watcher:
            if last_claim:
                self._watcher.claim_changed(self._position, digest, False)
            if last_of_tenant:
                self._watcher.tenant_changed(self._position, entry.tenant, False)
            self._watcher.room_changed(self._position)
        return True

    def moved(self, number: int, added: list[Copy], removed: list[tuple[str, Tier]], now: float) -> bool:
        """Takes a residency delta. False: one before it is missing."""
        for copy in added:
            if copy.tier is Tier.SLOT:
                self.usage.paged_in(copy.digest, now)
        taken = self.residency.apply(number, added, removed)
        if taken and self._watcher:
            changed = {copy.digest for copy in added} | {digest for digest, _ in removed}
            self._watcher.copies_changed(self._position, changed)
        return taken

    def reported(self, report: Report) -> None:
        """Takes a newer report."""
        self.report = report
        while self._unreported and self._sent - len(self._unreported) < report.received:
            dispatch_id, entry = self._unreported.popleft()
            _take_one(self._new, entry.digest)
            if self._running.get(dispatch_id) is entry:
                self._known[entry.digest] += 1
            self._weigh(entry.digest)
        self._tell_state()

    def reset(self) -> list[str]:
        """The stream ended: forgets everything it told, and returns the dispatches that ended with it.

        `phase` and `detail` are the caller's to set.
        """
        lost = list(self._running)
        claims, tenants = list(self._claims), list(self._tenants)
        self.report = Report()
        self.streams += 1
        self.dropping.clear()
        self._sent = 0
        for told in (self._unreported, self._running, self._claims, self._tenants, self._new, self._known):
            told.clear()
        self._promised.clear()
        self.usage.interrupted()
        self.limits, self.residency = None, Residency()
        if self._watcher:
            for digest in claims:
                self._watcher.claim_changed(self._position, digest, False)
            for tenant in tenants:
                self._watcher.tenant_changed(self._position, tenant, False)
            self._watcher.state_changed(self._position)
        return lost

    def _weigh(self, digest: str) -> None:
        """Whether the version takes a slot that the report does not know as taken."""
        if digest in self._new and digest not in self._known and digest != BASE:
            self._promised.add(digest)
        else:
            self._promised.discard(digest)

    def _tell_state(self) -> None:
        if self._watcher:
            self._watcher.state_changed(self._position)

    def check(self) -> None:
        """Raises AssertionError when the counts disagree with the dispatches."""
        running = list(self._running.values())
        assert self._claims == Counter(sent.digest for sent in running)
        assert self._tenants == Counter(sent.tenant for sent in running)
        covered = self._sent - len(self._unreported)
        assert self._known == Counter(sent.digest for sent in running if sent.number <= covered)
        assert self._new == Counter(sent.digest for _, sent in self._unreported)
        assert self._promised == self._new.keys() - self._known.keys() - {BASE}
        for counts in (self._claims, self._tenants, self._new, self._known):
            assert all(count > 0 for count in counts.values())
        numbers = [sent.number for _, sent in self._unreported]
        assert numbers == list(range(covered + 1, self._sent + 1))
        self.residency.check()


def _add_one(counts: Counter[str], key: str) -> bool:
    """Whether it is the first one."""
    before = counts.get(key, 0)  # A Counter's own default is a call into Python.
    counts[key] = before + 1
    return not before


def _take_one(counts: Counter[str], key: str) -> bool:
    """Whether it was the last one."""
    counts[key] -= 1
    if counts[key]:
        return False
    del counts[key]
    return True
