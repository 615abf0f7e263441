"""Calls a second that one address may make, whoever it says it is."""

import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from lorafleet.doors.refusals import TooManyCalls

MAX_PEERS = 4096
BURST_S = 2.0


def host(peer: str) -> str:
    """Of a peer as gRPC tells it, without the port: "ipv4:1.2.3.4:5" is 1.2.3.4, and
    "ipv6:%5B::1%5D:5" is ::1."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")


class PeerRates:
    """A token bucket for each address; `calls_per_s` 0 lets everyone through.

    So many of MAX_PEERS are kept, the ones seen last: who has been forgotten begins with a full bucket.
    """

    def __init__(self, calls_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = calls_per_s
        self._burst = max(1.0, calls_per_s * BURST_S)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # Tokens left, and when.

    def __bool__(self) -> bool:
        return self._rate > 0

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, address: str) -> None:
        """Raises TooManyCalls."""
        now = self._clock()
        left, since = self._buckets.pop(address, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        self._buckets[address] = (max(0.0, left - 1), now)
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        if left < 1:
            raise TooManyCalls(f"more than {self._rate:g} calls a second come from this address")
