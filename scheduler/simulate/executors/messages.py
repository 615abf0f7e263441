"""What passes between simulated schedulers and executors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler.fleet.state import Report
from scheduler.simulate.executors.copies import Delta
from scheduler.simulate.executors.sequence import Sequence

MAX_TOLD = 64  # Of those that wait for a slot.


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What a scheduler asks for; `known` and `left`: see `Sequence`."""

    dispatch_id: str
    digest: str
    known: int
    left: int
    accepted_at: float
    session: str = ""
    shared: int = 0


@dataclass(slots=True)
class Said:
    """What one beat tells a scheduler, in this order. `tokens` are (dispatch, how many there are by now)."""

    tokens: list[tuple[str, int]] = field(default_factory=list)
    finished: list[tuple[str, int]] = field(default_factory=list)  # And how many of the prompt were cached.
    rejected: list[str] = field(default_factory=list)
    delta: Delta | None = None
    report: Report | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """One scheduler: `take` is told what is said, at once. `live` are its dispatches that have not ended."""

    take: Callable[[Said], None]
    live: dict[str, Sequence] = field(default_factory=dict)
    received: int = 0
    promised: int = 0
    cold: dict[str, tuple[float, float]] = field(default_factory=dict)  # Since when, and until when.

    def waits(self, digest: str, since: float, until: float) -> None:
        """A version waits for a slot; the earliest `since` stands."""
        before = self.cold.get(digest)
        self.cold[digest] = (min(since, before[0]) if before else since, until)

    def lapse(self, now: float) -> None:
        """Ends what was not told again in time."""
        for digest in [digest for digest, (_, until) in self.cold.items() if until <= now]:
            del self.cold[digest]


def cold_line(streams: Iterable[Stream]) -> tuple[tuple[str, float], ...]:
    """Who waits for a slot by what any scheduler has told, as (digest, since), the longest wait first."""
    since: dict[str, float] = {}
    for stream in streams:
        for digest, (begun, _) in stream.cold.items():
            since[digest] = min(begun, since.get(digest, begun))
    return tuple(sorted(since.items(), key=lambda wait: (wait[1], wait[0]))[:MAX_TOLD]) if since else ()
