"""Which versions schedulers say that their requests wait for, since no slot is free. Pure."""

import math
from dataclasses import dataclass

# Each takes some 80 bytes of every load, and a load goes out with almost every step.
MAX_TOLD = 64
MAX_OF_A_STREAM = 256


@dataclass(frozen=True, slots=True)
class ColdWait:
    """A version that waits, and `since` when, in seconds of a monotonic clock."""

    digest: str
    since: float


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said by one stream, of one version. `until` is when it is over unless it is said again."""

    since: float
    until: float


class ColdWaits:
    """What each stream said last. A stream's earliest `since` of a version stands until that wait ends."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[str, _Said]] = {}
        self._line: tuple[ColdWait, ...] | None = ()  # None: it must be made anew

    def begin(self, stream: int, digest: str, since: float, until: float = math.inf) -> bool:
        """Or says again that it waits. Whether that is new. Of too many on one stream the one that waits
        shortest is forgotten."""
        waits = self._streams.setdefault(stream, {})
        before = waits.get(digest)
        waits[digest] = _Said(min(since, before.since) if before else since, until)
        if len(waits) > MAX_OF_A_STREAM:
            del waits[max(waits, key=lambda each: waits[each].since)]
        self._line = None
        return before is None

    def end(self, stream: int, digest: str) -> bool:
        """Whether the stream had said that it waits."""
        if self._streams.get(stream, {}).pop(digest, None) is None:
            return False
        self._line = None
        return True

    def lapse(self, now: float) -> None:
        """Ends what was not said again in time: its scheduler may stand still, and others keep slots free."""
        for waits in self._streams.values():
            for digest in [digest for digest, said in waits.items() if said.until <= now]:
                del waits[digest]
                self._line = None

    def close(self, stream: int) -> None:
        """The stream is over, and all its waits with it."""
        if self._streams.pop(stream, None):
            self._line = None

    def line(self) -> tuple[ColdWait, ...]:
        """The waits of all streams, the longest wait first, ties by digest; at most `MAX_TOLD`."""
        if self._line is None:
            self._line = self._in_order()
        return self._line

    def _in_order(self) -> tuple[ColdWait, ...]:
        since: dict[str, float] = {}
        for waits in self._streams.values():
            for digest, said in waits.items():
                since[digest] = min(said.since, since.get(digest, said.since))
        ordered = sorted(since, key=lambda digest: (since[digest], digest))
        return tuple(ColdWait(digest, since[digest]) for digest in ordered[:MAX_TOLD])
