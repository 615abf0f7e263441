"""The versions behind refs, from memory: where pushes and alias moves become visible, and when.

One thread asks the store several times a second what changed. An alias is answered from memory only while
the last answer is younger than `max_staleness_s`; so within that time every scheduler sees a move, or says
UNAVAILABLE. A digest names the same content for ever: it is answered from memory when the store is away, too.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter_store import AdapterNotFound, DataLoss, NameRecord, Ref, Resolver, StoreUnavailable, Version
from adapter_store.catalogue import version_of
from adapter_store.record import VersionEntry

POLL_S = 0.2
MAX_AGE_S = 30.0  # A record is read again then, whatever the news say: a failover may have lost some.
MAX_NAMES = 4096
_READ_AHEAD = 256  # names at one look; the others are read when somebody asks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    record: NameRecord
    read_at: float
    changed: bool = False  # The news said so: it must be read again.
    versions: dict[str, Version] = field(default_factory=dict)  # Those that somebody asked for.


class Versions:
    """Thread-safe. `count` is told where each answer came from: "memory", "store" or "memory_unconfirmed".

    What is current is a matter of `clock`. How long the store is silent is measured on `awake`, which runs
    only while this process does (scheduler/heartbeat.py).
    """

    def __init__(
        self,
        store: Resolver,
        max_staleness_s: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[str], None] = lambda source: None,
        awake: Callable[[], float] | None = None,
    ) -> None:
        self._store, self.max_staleness_s = store, max_staleness_s
        self._clock, self._awake, self._count = clock, awake or clock, count
        self._names: OrderedDict[tuple[str, str], _Known] = OrderedDict()  # What was used last is last.
        self._number = -1  # Of the last news.
        self._heard = 0  # News that told of changes.
        self._confirmed_at = float("-inf")
        self._asking_since: float | None = None  # While the thread waits for an answer; by `awake`.
        self._answers = True  # Until it is known that the store does not.
        self._changed = threading.Condition()  # Guards all above.
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-news", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A question to the store that is under way is not waited for, and who waits here waits no more."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def known(self, ref: Ref, sticky_key: str | None = None, *, resumed: bool = False) -> Version | None:
        """The answer, if it is in memory and certain; never blocks. `resumed` as in resolve. Raises
        DataLoss."""
        with self._changed:
            version = self._recall(ref, sticky_key, resumed, confirmed=True)
        if version is not None:
            self._count("memory")
        return version

    def resolve(self, ref: Ref, sticky_key: str | None = None, *, resumed: bool = False) -> Version:
        """As Resolver.resolve. StoreUnavailable at once while the store is known not to answer.

        `resumed`: for a stream that was accepted before, perhaps by another scheduler, and goes on here. It
        does so on a version that takes no new requests any more, unless the withdrawal ends accepted ones."""
        version = self.known(ref, sticky_key, resumed=resumed)
        if version is not None:
            return version
        try:
            self._wait_confirmed()
            version = self._read(ref, sticky_key, resumed)
        except StoreUnavailable:
            with self._changed:
                version = self._recall(ref, sticky_key, resumed, confirmed=False)
            if version is None:
                raise
            self._count("memory_unconfirmed")
            return version
        self._count("store")
        return version

    @property
    def number(self) -> int:
        """Of the last change that answers here take into account."""
        with self._changed:
            return self._number

    def takes(self, ref: Ref, *, resumed: bool = False) -> bool:
        """Whether the version that a digest ref names takes requests, by all changes up to `number`; never
        blocks. `resumed` as in resolve. False: it is not known here. Raises AdapterNotFound, DataLoss when
        it does not."""
        with self._changed:
            known = self._names.get((ref.tenant, ref.name))
            if known is None or known.changed:
                return False
            known.record.active_digest_of(ref, None, resumed=resumed)
            return True

    def entry(self, tenant: str, name: str, digest: str) -> VersionEntry | None:
        """What the last record that was read says of a version; None: it says nothing. Blocks while it reads
        a record that has changed. Raises StoreUnavailable, DataLoss."""
        with self._changed:
            known = self._names.get((tenant, name))
            if known is not None and not self._is_old(known):
                return known.record.versions.get(digest)
        return self._load(tenant, name).record.versions.get(digest)

    def forget(self, tenant: str, name: str) -> None:
        """After a change of one's own: the next answer has it."""
        with self._changed:
            self._heard += 1
            if known := self._names.get((tenant, name)):
                known.changed = True

    def ask(self) -> None:
        """Asks the store what changed. Raises StoreUnavailable."""
        with self._changed:
            asked_at, self._asking_since = self._clock(), self._awake()
        try:
            news = self._store.news(self._number)
        except BaseException:
            with self._changed:
                self._asking_since, self._answers = None, False
                self._changed.notify_all()
            raise
        with self._changed:
            if news.names is None or news.names:
                self._heard += 1
            for name in self._names if news.names is None else news.names & self._names.keys():
                self._names[name].changed = True
            self._number, self._confirmed_at = news.number, asked_at
            self._asking_since, self._answers = None, True
            self._changed.notify_all()

    @property
    def age_s(self) -> float:
        """Since what is in memory was known to be current."""
        with self._changed:
            return self._clock() - self._confirmed_at

    def __len__(self) -> int:
        return len(self._names)

    def _recall(self, ref: Ref, sticky_key: str | None, resumed: bool, *, confirmed: bool) -> Version | None:
        """Under the lock. Not confirmed: only what a digest ref named when the store last answered, and then
        only while it has not told that this name changed."""
        key = (ref.tenant, ref.name)
        known = self._names.get(key)
        if (
            known is None
            or known.changed
            or (confirmed and (self._is_old(known) or not self._is_confirmed()))
        ):
            return None
        if not confirmed and ref.digest is None:
            return None
        try:
            digest = known.record.active_digest_of(ref, sticky_key, resumed=resumed)
        except AdapterNotFound:  # What was pushed a moment ago is there: the store is to say that it is not.
            return None
        self._names.move_to_end(key)
        return known.versions.get(digest)

    def _is_old(self, known: _Known) -> bool:
        return known.changed or self._clock() - known.read_at > MAX_AGE_S

    def _is_confirmed(self) -> bool:
        return self._clock() - self._confirmed_at <= self.max_staleness_s

    def _wait_confirmed(self) -> None:
        """A thread that is only late on a busy machine is waited for; a store that is silent is not."""
        with self._changed:
            give_up = self._awake() + self.max_staleness_s
            while not (self._is_confirmed() or self._is_silent()) and self._awake() < give_up:
                self._changed.wait(POLL_S)
            if not self._is_confirmed():
                raise StoreUnavailable("the adapter store does not answer")

    def _is_silent(self) -> bool:
        asking_s = 0.0 if self._asking_since is None else self._awake() - self._asking_since
        return self._stopped.is_set() or not self._answers or asking_s > self.max_staleness_s

    def _read(self, ref: Ref, sticky_key: str | None, resumed: bool) -> Version:
        asked_at = self._clock()
        known = self._load(ref.tenant, ref.name)
        digest = known.record.active_digest_of(ref, sticky_key, resumed=resumed)
        version = known.versions.get(digest)
        if version is None:
            version = version_of(ref, known.record, digest, self._store.manifest(digest))
            with self._changed:
                known.versions[digest] = version
        if self._clock() - asked_at > self.max_staleness_s:
            raise StoreUnavailable("the adapter store answers too slowly to say what is current")
        return version

    def _load(self, tenant: str, name: str) -> _Known:
        """Reads a record, and keeps it unless it may have changed meanwhile or names nothing."""
        with self._changed:
            heard = self._heard
            former = self._names.get((tenant, name))
        known = _Known(self._store.record(tenant, name), self._clock())
        with self._changed:
            if former is not None:
                known.versions = _renewed(former.versions, known.record)
            if heard == self._heard and known.record.versions:
                self._names[tenant, name] = known
                self._names.move_to_end((tenant, name))
                if len(self._names) > MAX_NAMES:
                    self._names.popitem(last=False)
            elif not known.record.versions:
                self._names.pop((tenant, name), None)
        return known

    def _read_changed(self) -> None:
        """So that digests of names that have changed are certain when the store is away later, though nobody
        has asked for them meanwhile. Raises StoreUnavailable."""
        with self._changed:
            changed = [name for name, known in self._names.items() if known.changed][-_READ_AHEAD:]
        for name in changed:
            try:
                self._load(*name)
            except DataLoss:  # Whoever asks for it is told.
                with self._changed:
                    self._names.pop(name, None)

    def _run(self) -> None:
        away = False
        while not self._stopped.is_set():
            try:
                self.ask()
                self._read_changed()
                if away:
                    logger.warning("the adapter store answers again")
                away = False
            except StoreUnavailable as error:
                if not away:
                    logger.warning("the adapter store does not say what changed: %s", error)
                away = True
            except Exception:
                logger.exception("a look at the adapter store's news failed; the next one tries again")
            self._stopped.wait(POLL_S)


def _renewed(versions: dict[str, Version], record: NameRecord) -> dict[str, Version]:
    """Those that the record still names, as it has them now; what they hold stays the same."""
    return {
        digest: version_of(Ref(old.tenant, old.name, digest=digest), record, digest, old.manifest)
        for digest, old in versions.items()
        if digest in record.versions
    }
