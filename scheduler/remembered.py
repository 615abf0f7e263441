"""What digest refs named, for while the store is away: a version never changes, so an old answer is right."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from adapter_store import AdapterNotFound, AdapterStore, Ref, StoreUnavailable, Version

AWAY_SECONDS = 1.0  # for which a store that failed is not asked again: callers get their answer at once
MAX_REMEMBERED = 4096


class RememberedVersions:
    """Resolves refs as the store does, and those with a digest without it when need be. Thread-safe.

    The store is asked whenever it answers, so moved aliases and deleted versions count at once. An alias says
    nothing while it cannot be looked up: StoreUnavailable.
    """

    def __init__(self, store: AdapterStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._versions: OrderedDict[Ref, Version] = OrderedDict()  # by ref with digest; used last is last
        self._ask_again_at = 0.0
        self._is_away = False
        self._lock = threading.Lock()  # guards the three above

    def resolve(self, ref: Ref, sticky_key: str | None = None) -> Version:
        """Raises AdapterNotFound, DataLoss, StoreUnavailable."""
        if not self._may_ask():
            return self._recall(ref, StoreUnavailable("the adapter store is away; it is asked again soon"))
        try:
            version = self._store.resolve(ref, sticky_key)
        except StoreUnavailable as error:
            with self._lock:
                self._is_away, self._ask_again_at = True, self._clock() + AWAY_SECONDS
            return self._recall(ref, error)
        except AdapterNotFound:
            with self._lock:
                self._is_away = False
                self._versions.pop(ref, None)
            raise
        self._remember(version)
        return version

    def _may_ask(self) -> bool:
        """While the store is away, one caller at a time may find out whether it is back."""
        with self._lock:
            now = self._clock()
            if self._is_away and now < self._ask_again_at:
                return False
            self._ask_again_at = now + AWAY_SECONDS
            return True

    def _recall(self, ref: Ref, error: StoreUnavailable) -> Version:
        with self._lock:
            version = self._versions.get(ref)
        if version is None:
            raise error
        return version

    def _remember(self, version: Version) -> None:
        ref = Ref(version.tenant, version.name, digest=version.digest)
        with self._lock:
            self._is_away = False
            self._versions[ref] = version
            self._versions.move_to_end(ref)
            if len(self._versions) > MAX_REMEMBERED:
                self._versions.popitem(last=False)
