"""Calls a second that one address may make, whoever it says it is."""

import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from lorafleet.doors.promises import Promises
from lorafleet.doors.refusals import TooManyCalls

MAX_PEERS = 4096
BURST_S = 2.0
MAX_TOLD = 64  # Of one address, to come again; others are told, and nothing is kept for them.
_NEARLY = 1e-6  # Of a token: what floats lose.


def host(peer: str) -> str:
    """The host of a peer as gRPC tells it, without the port: "ipv4:1.2.3.4:5" is 1.2.3.4, and
    "ipv6:%5B::1%5D:5" is ::1."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")


class PeerRates:
    """A token bucket for each address; `calls_per_s` 0 lets everyone through.

    Who is refused is told when its token comes, behind those of all who were told before, and then gets it in
    any case. No token is left for who was told to come, who might not: the address may owe MAX_TOLD of them
    for moments. MAX_PEERS are kept, the ones seen last: who has been forgotten begins with a full bucket.
    """

    def __init__(self, calls_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = calls_per_s
        self._burst = max(1.0, calls_per_s * BURST_S)
        self._clock = clock
        self._buckets = OrderedDict[str, _Bucket]()

    def __bool__(self) -> bool:
        return self._rate > 0

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, address: str, key: str = "") -> None:
        """`key` is by what a call is known that comes again, "" for any of the address. Raises
        TooManyCalls."""
        now = self._clock()
        bucket = self._buckets.setdefault(address, _Bucket(self._burst, now))
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        wait_s = bucket.take(key, now, self._rate, self._burst)
        if wait_s is not None:
            message = f"more than {self._rate:g} calls a second come from this address"
            raise TooManyCalls(message, retry_after_s=wait_s)


class _Bucket:
    """The bucket of one address."""

    def __init__(self, left: float, now: float) -> None:
        self._left, self._at = left, now
        self._told = Promises[None](lambda _: None, MAX_TOLD)

    def take(self, key: str, now: float, rate: float, burst: float) -> float | None:
        """None, or seconds until there is a token that nobody was told to come for."""
        self._left, self._at = min(burst, self._left + (now - self._at) * rate), now
        self._told.lapse(now)
        key = self._told.key_of("", key, now)
        promise = self._told.get(key)
        if promise is not None and now < promise.due:
            return promise.due - now
        if promise is not None or self._left >= 1 - _NEARLY:
            self._told.end(key)
            self._left -= 1
            return None
        wait_s = (1 - self._left + len(self._told)) / rate
        self._told.make(key, now, now + wait_s, None, "")
        return wait_s
