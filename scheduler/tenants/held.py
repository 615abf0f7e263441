"""What tenants hold at once of something that all share: bounded for each of them, and in all."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler.errors import TooMuchHeld

FIRST_GUESS_S = 1.0  # Of how long something is held, before any was given back.
NEWEST = 0.2  # What the last one counts in the mean.
LEAST_RETRY_S, MOST_RETRY_S = 0.1, 60.0


class Held:
    """Counts of one kind, used from one event loop. The retry delay of a refusal is the mean time for which
    it was held lately, in [0.1 s, 60 s]."""

    def __init__(
        self,
        reason: str,
        what: str,
        most: int,
        share: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most` in all, and `share(tenant)` of one, where 0 is no limit. A refusal has `reason`, and says
        that there are too many of `what`."""
        self._reason = reason
        self._what = what
        self._most = most
        self._share = share
        self._clock = clock
        self._mean_s = FIRST_GUESS_S
        self._by_tenant = Counter[str]()  # No one of them is 0.

    def __getitem__(self, tenant: str) -> int:
        return self._by_tenant[tenant]

    @property
    def total(self) -> int:
        return self._by_tenant.total()

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Raises TooMuchHeld."""
        self.take(tenant, 1)
        began = self._clock()
        try:
            yield
        finally:
            self.lasted(self._clock() - began)
            self.give_back(tenant, 1)

    def take(self, tenant: str, amount: int) -> None:
        """To be given back. Raises TooMuchHeld."""
        share = self._share(tenant) or math.inf
        if self._by_tenant[tenant] + amount > share:
            self._refuse(f"tenant {tenant} has too many {self._what}: at most {share} at once")
        if self.total + amount > self._most:
            self._refuse(f"there are too many {self._what} now")
        self._by_tenant[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self._by_tenant[tenant] -= amount
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def lasted(self, seconds: float) -> None:
        """What `take` took, and is given back now."""
        self._mean_s += NEWEST * (seconds - self._mean_s)

    def _refuse(self, message: str) -> None:
        retry_after_s = min(max(self._mean_s, LEAST_RETRY_S), MOST_RETRY_S)
        raise TooMuchHeld(self._reason, message, retry_after_s=retry_after_s)
