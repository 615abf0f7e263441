"""Which versions schedulers say that their requests wait for, since no slot is free. Pure."""

from dataclasses import dataclass

# Each takes some 80 bytes of every load, and a load goes out with almost every step.
MAX_TOLD = 64
MAX_OF_A_STREAM = 256


@dataclass(frozen=True, slots=True)
class ColdWait:
    """A version that waits, and `since` when, in seconds of a monotonic clock."""

    digest: str
    since: float


class ColdWaits:
    """What each stream said last. A stream's earliest `since` of a version stands until that wait ends."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[str, float]] = {}
        self._line: tuple[ColdWait, ...] | None = ()  # None: it must be made anew

    def begin(self, stream: int, digest: str, since: float) -> None:
        """Of too many on one stream the one that waits shortest is forgotten."""
        waits = self._streams.setdefault(stream, {})
        waits[digest] = min(since, waits.get(digest, since))
        if len(waits) > MAX_OF_A_STREAM:
            del waits[max(waits, key=waits.__getitem__)]
        self._line = None

    def end(self, stream: int, digest: str) -> bool:
        """Whether the stream had said that it waits."""
        if self._streams.get(stream, {}).pop(digest, None) is None:
            return False
        self._line = None
        return True

    def close(self, stream: int) -> None:
        """The stream is over, and all its waits with it."""
        if self._streams.pop(stream, None):
            self._line = None

    def line(self) -> tuple[ColdWait, ...]:
        """Of all streams, the longest wait first, ties by digest; at most `MAX_TOLD`."""
        if self._line is None:
            self._line = self._in_order()
        return self._line

    def _in_order(self) -> tuple[ColdWait, ...]:
        since: dict[str, float] = {}
        for waits in self._streams.values():
            for digest, begun in waits.items():
                since[digest] = min(begun, since.get(digest, begun))
        ordered = sorted(since, key=lambda digest: (since[digest], digest))
        return tuple(ColdWait(digest, since[digest]) for digest in ordered[:MAX_TOLD])
