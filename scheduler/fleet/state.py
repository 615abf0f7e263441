"""What the scheduler knows of one executor: its limits, its last report and what was sent since. Pure."""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from scheduler.fleet.claims import Sent, Version
from scheduler.fleet.rates import UNKNOWN, Rates
from scheduler.fleet.residency import BASE, Copy, Residency, Tier
from scheduler.fleet.usage import Usage
from scheduler.fleet.watcher import Told, Watcher


class Phase(IntEnum):
    """Same numbers as ExecutorState on the wire."""

    CONNECTING = 1
    READY = 2
    DRAINING = 3
    REFUSED = 4
    HUNG = 5


CLOSED = ("leaving", "cordoned", "tripped")
"""Why executors that are ready take nothing, other than for a trial."""


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
    knows_waits: bool = False  # repeats to all schedulers who waits for a slot
    knows_constraints: bool = False  # and the other masks over what may be drawn

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
    rates: Rates = UNKNOWN


class ExecutorState:
    """One executor, for one stream at a time: `reset` forgets what the last stream told.

    Room is what the last report says less what was sent after it. What ended since does not count as room
    before the next report, so we never promise more than the executor does.

    phase       the caller's to set, as all of these
    cordoned    an operator has closed it
    leaving     it is no executor of this fleet any more, and goes when what it runs has ended
    on_trial    closed to all but one, which may crash it
    tripped     its circuit breaker has closed it, since it fails what it is sent
    half_open   tripped, and open for one dispatch, by which it is judged
    """

    phase = Told(Phase.CONNECTING)
    cordoned = Told(False)
    leaving = Told(False)
    on_trial = Told(False)
    tripped = Told(False)
    half_open = Told(False)

    def __init__(self, address: str, phase: Phase = Phase.CONNECTING, name: str = "") -> None:
        """`name` is what it is known by while it is a member; `address`, which it is if left out, is only
        how it is reached."""
        self.name = name or address
        self.address = address
        self.detail = "not connected yet"
        self.instance_id = ""
        self.report = Report()
        self.usage = Usage()
        self.last_limits: Limits | None = None  # Of the last hello, whether or not its stream has ended.
        self.streams = 0  # that have ended
        self.dropping: dict[int, str] = {}  # Digests by number, of drops not done.
        self.probe = ""  # The dispatch that went out while it was half open.
        self._limits: Limits | None = None
        self._seat_limit: int | None = None
        self._residency = Residency()
        self._sent = 0
        self._running: dict[str, Sent] = {}  # By dispatch id.
        self._unreported: deque[Sent] = deque()  # What the last report does not cover.
        self._versions: dict[str, Version] = {}  # By digest, the base model's among them.
        self._promised = 0  # Versions that need a slot that the report still counts as free.
        self._tenants: dict[str, int] = {}  # Unfinished dispatches by tenant, none zero.
        self._watcher: Watcher | None = None
        self._position = 0
        self.phase = phase

    def watch(self, watcher: Watcher | None, position: int) -> None:
        """Tells one watcher of every change from now on, or none."""
        self._watcher, self._position = watcher, position

    @property
    def limits(self) -> Limits | None:
        """None before the stream's hello."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits | None) -> None:
        self._limits = limits
        self.last_limits = limits or self.last_limits
        if self._watcher:
            self._watcher.limits_changed(self._position)

    @property
    def residency(self) -> Residency:
        """The copies, for reading: changes come through `moved`, or as a whole."""
        return self._residency

    @residency.setter
    def residency(self, residency: Residency) -> None:
        digests = self._residency.digests() | residency.digests()
        self._residency = residency
        self._follow_copies(digests)

    @property
    def serves(self) -> bool:
        """Whether requests may wait for it: on trial or tripped it is soon there again."""
        return self.phase is Phase.READY and not self.cordoned and not self.leaving

    @property
    def takes_requests(self) -> bool:
        return self.serves and not self.on_trial and (self.half_open or not self.tripped)

    @property
    def condition(self) -> str:
        """Its phase, or the first of `CLOSED` that holds where it would be ready."""
        if self.phase is Phase.READY:
            for name in CLOSED:
                if getattr(self, name):
                    return name
        return self.phase.name.lower()

    @property
    def busy_seats(self) -> int:
        """Seats in use there, whoever's, whatever part of the others it may give away for now."""
        seats = self._limits.max_seats if self._limits else 0
        return seats - self.report.free_seats + len(self._unreported)

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
        free = self.report.free_seats - len(self._unreported)
        if self._seat_limit is not None:
            free = min(free, self._seat_limit - len(self._running))
        return free if free > 0 else 0

    @property
    def seat_limit(self) -> int | None:
        """How many dispatches may run there at most; None: as many as it has seats."""
        return self._seat_limit

    @seat_limit.setter
    def seat_limit(self, seats: int | None) -> None:
        self._seat_limit = seats
        if self._watcher:
            self._watcher.room_changed(self._position)

    @property
    def free_slots(self) -> int:
        """Slots that a version without a claim here could take."""
        free = self.report.free_slots - self._promised
        return free if free > 0 else 0

    def may_hold(self, digest: str) -> bool:
        """Whether it has told of a copy, or may still get one that a load brings which is under way."""
        return self.residency.tier(digest) > Tier.NOWHERE or digest in self.dropping.values()

    def claims(self, digest: str) -> int:
        """Unfinished dispatches of one version; above zero it has, or was promised, a slot."""
        version = self._versions.get(digest)
        return version.claims if version else 0

    def claimed(self) -> frozenset[str]:
        """Versions with unfinished dispatches, without the base model."""
        return frozenset(self.digests()) - {BASE}

    def digests(self) -> list[str]:
        """Versions with unfinished dispatches, the base model's empty digest among them."""
        return [digest for digest, version in self._versions.items() if version.claims]

    def last_use(self, digest: str) -> float | None:
        """When a dispatch of the version was last sent or ended; None when none is remembered."""
        version = self._versions.get(digest)
        return version.used_at if version and version.claims else self.usage.last_use(digest)

    def tenants(self) -> Mapping[str, int]:
        """How many unfinished dispatches each tenant has that has some."""
        return self._tenants

    def dispatch_ids(self) -> list[str]:
        return list(self._running)

    def runs(self, dispatch_id: str) -> bool:
        """Whether a dispatch was sent and has not ended."""
        return dispatch_id in self._running

    def sent(self, dispatch_id: str, digest: str, now: float = 0.0, tenant: str = "") -> None:
        """Counts a dispatch that is written to the stream."""
        version = self._versions.get(digest)
        if version is None:
            version = self._versions[digest] = Version(self._residency.tier(digest))
        if digest != BASE:
            self.usage.used(digest, version.tier, now)
            if not version.unreported and not version.known:
                self._promised += 1
        self._sent += 1
        entry = self._running[dispatch_id] = Sent(digest, tenant, version)
        self._unreported.append(entry)
        version.unreported += 1
        version.claims += 1
        version.used_at = now
        of_tenant = self._tenants.get(tenant, 0)
        self._tenants[tenant] = of_tenant + 1
        if self._watcher:
            if version.claims == 1:
                self._watcher.claim_changed(self._position, digest, True)
            self._watcher.tenant_changed(self._position, tenant, of_tenant + 1)
            self._watcher.room_changed(self._position)
        if self.half_open:
            self.probe, self.half_open = dispatch_id, False

    def ended(self, dispatch_id: str, now: float = 0.0) -> bool:
        """Forgets a dispatch. Whether it was one of ours and had not ended."""
        entry = self._running.pop(dispatch_id, None)
        if entry is None:
            return False
        entry.has_ended = True
        version, digest = entry.version, entry.digest
        version.claims -= 1
        version.used_at = now
        if entry.is_reported:
            self._count(entry, unreported=0, known=-1)
        if not version.claims:
            self.usage.given_up(digest, now)
        of_tenant = self._tenants[entry.tenant] = self._tenants[entry.tenant] - 1
        if not of_tenant:
            del self._tenants[entry.tenant]
        if self._watcher:
            if not version.claims:
                self._watcher.claim_changed(self._position, digest, False)
            self._watcher.tenant_changed(self._position, entry.tenant, of_tenant)
            self._watcher.room_changed(self._position)
        return True

    def moved(self, number: int, added: list[Copy], removed: list[tuple[str, Tier]], now: float) -> bool:
        """Takes a residency delta. False: one before it is missing."""
        for copy in added:
            if copy.tier is Tier.SLOT:
                self.usage.paged_in(copy.digest, now)
        taken = self.residency.apply(number, added, removed)
        if taken:
            self._follow_copies({copy.digest for copy in added} | {digest for digest, _ in removed})
        return taken

    def reported(self, report: Report) -> None:
        """Takes a newer report."""
        self.report = report
        while self._unreported and self._sent - len(self._unreported) < report.received:
            entry = self._unreported.popleft()
            entry.is_reported = True
            self._count(entry, unreported=-1, known=0 if entry.has_ended else 1)
        self.tell_state()

    def reset(self) -> list[str]:
        """The stream ended: forgets everything it told, and returns the dispatches that ended with it.

        `phase` and `detail` are the caller's to set.
        """
        lost = list(self._running)
        digests, tenants = self.digests(), list(self._tenants)
        for digest in digests:
            self.usage.given_up(digest, self._versions[digest].used_at)
        self.report = Report()
        self.streams += 1
        self.dropping.clear()
        self._sent = 0
        self._promised = 0
        for told in (self._unreported, self._running, self._versions, self._tenants):
            told.clear()
        self.usage.interrupted()
        self.limits, self.residency = None, Residency()
        self.tripped = self.half_open = False
        if self._watcher:
            for digest in digests:
                self._watcher.claim_changed(self._position, digest, False)
            for tenant in tenants:
                self._watcher.tenant_changed(self._position, tenant, 0)
            self._watcher.state_changed(self._position)
        return lost

    def _count(self, entry: Sent, unreported: int, known: int) -> None:
        """Moves the counts of a dispatch's version, and forgets it when it has none any more."""
        version = entry.version
        was_promised = version.is_promised()
        version.unreported += unreported
        version.known += known
        if entry.digest != BASE:
            self._promised += version.is_promised() - was_promised
        if not version.claims and not version.unreported:
            del self._versions[entry.digest]

    def _follow_copies(self, digests: Collection[str]) -> None:
        for digest in digests:
            if version := self._versions.get(digest):
                version.tier = self._residency.tier(digest)
        if self._watcher:
            self._watcher.copies_changed(self._position, digests)

    def tell_state(self) -> None:
        """Something is other than before that decides whether it takes requests."""
        if self._watcher:
            self._watcher.state_changed(self._position)

    def check(self) -> None:
        """Raises AssertionError when the counts disagree with the dispatches."""
        running, unreported = list(self._running.values()), list(self._unreported)
        assert not any(sent.has_ended for sent in running)
        assert {id(sent) for sent in running if not sent.is_reported} == {
            id(sent) for sent in unreported if not sent.has_ended
        }
        assert not any(sent.is_reported for sent in unreported) and len(unreported) <= self._sent
        assert self._tenants == Counter(sent.tenant for sent in running)
        assert self._versions.keys() == {sent.digest for sent in running + unreported}
        for digest, version in self._versions.items():
            of_running = [sent for sent in running if sent.digest == digest]
            assert version.claims == len(of_running)
            assert version.tier == self._residency.tier(digest)
            assert version.known == sum(sent.is_reported for sent in of_running)
            assert version.unreported == sum(sent.digest == digest for sent in unreported)
            assert all(sent.version is version for sent in running + unreported if sent.digest == digest)
        promised = {digest for digest, version in self._versions.items() if version.is_promised()}
        assert self._promised == len(promised - {BASE})
        self.residency.check()
