"""The search for the smallest fleet that reaches its goals. Pure.

It takes it that more of anything is never worse, so each least number is found by halving: of executors with
the most slots and host memory, then of slots, then of host memory. What is beside that is tried, too, for the
curve around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

# Twice as many executors that make what misses its goal better by no more than this share do not help, nor
# do still more.
_FLAT = 0.01


@dataclass(frozen=True, slots=True, order=True)
class Fleet:
    """Executors alike: each with so many slots, and so many bytes of host memory for adapters."""

    executors: int
    slots: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet did under the load.

    `stream_tokens_s`: the tokens a second, behind the first one, that 99 % of the answers had at least.
    `failed`: the share of requests that were refused or not done in time.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    stream_tokens_s: float
    tokens_s: float
    page_ins_per_request: float
    failed: float = 0.0


@dataclass(frozen=True, slots=True)
class Goals:
    """`stream_tokens_s`: 0 is any."""

    ttft_p99_s: float
    stream_tokens_s: float = 0.0
    failed: float = 0.0

    def met_by(self, outcome: Outcome) -> bool:
        return (
            outcome.ttft_p99_s <= self.ttft_p99_s
            and outcome.stream_tokens_s >= self.stream_tokens_s
            and outcome.failed <= self.failed
        )


@dataclass(frozen=True, slots=True)
class Room:
    """What may be had: the fewest executors first, slots and host bytes in ascending order."""

    most_executors: int
    slots: Sequence[int]
    host_bytes: Sequence[int]


@dataclass(slots=True)
class Search:
    """`run` says what a fleet does; `tried` is all that it was asked for, in that order, and `tell` hears of
    each."""

    goals: Goals
    room: Room
    run: Callable[[Fleet], Outcome]
    tell: Callable[[Fleet, Outcome], None] = lambda fleet, outcome: None
    tried: dict[Fleet, Outcome] = field(default_factory=dict)
    best: Fleet | None = None
    is_flat: bool = False  # More executors do not help.

    def find(self) -> Fleet | None:
        """The smallest fleet that meets the goals, None when none does; `best` is the smallest so far."""
        room = self.room
        if (most := self._enough_executors(Fleet(1, room.slots[-1], room.host_bytes[-1]))) is None:
            return None
        fewer = range(most.executors // 2 + 1, most.executors + 1)
        self._least([replace(most, executors=executors) for executors in fewer])
        self._least([replace(self.best or most, slots=slots) for slots in room.slots])
        self._least([replace(self.best or most, host_bytes=host_bytes) for host_bytes in room.host_bytes])
        return self.best

    def around(self) -> None:
        """Tries what is beside the best: an executor less, one and two more, fewer and more slots, fewer
        slots with an executor more, and less and more host memory."""
        if not (best := self.best):
            return
        slots, host_bytes = (
            _beside(self.room.slots, best.slots),
            _beside(self.room.host_bytes, best.host_bytes),
        )
        beside = [replace(best, executors=best.executors + more) for more in (-1, 1, 2)]
        beside += [replace(best, slots=each) for each in slots]
        beside += [
            replace(best, slots=each, executors=best.executors + 1) for each in slots if each < best.slots
        ]
        beside += [replace(best, host_bytes=each) for each in host_bytes]
        for fleet in beside:
            if 0 < fleet.executors <= self.room.most_executors:
                self.meets(fleet)

    def meets(self, fleet: Fleet) -> bool:
        if fleet not in self.tried:
            outcome = self.tried[fleet] = self.run(fleet)
            self.tell(fleet, outcome)
        return self.goals.met_by(self.tried[fleet])

    def _enough_executors(self, fleet: Fleet) -> Fleet | None:
        """Found by doubling; None when the most that may be had are too few, or more do not help."""
        most, before = self.room.most_executors, None
        while not self.meets(fleet):
            outcome = self.tried[fleet]
            self.is_flat = before is not None and self._is_no_better(outcome, before)
            if self.is_flat or fleet.executors == most:
                return None
            before = outcome
            fleet = replace(fleet, executors=min(2 * fleet.executors, most))
        self.best = fleet
        return fleet

    def _is_no_better(self, outcome: Outcome, before: Outcome) -> bool:
        """In one of the goals that it misses: more of the same does not reach it."""
        is_late = outcome.ttft_p99_s > self.goals.ttft_p99_s
        is_slow = outcome.stream_tokens_s < self.goals.stream_tokens_s
        return not outcome.failed and (
            (is_late and outcome.ttft_p99_s > (1 - _FLAT) * before.ttft_p99_s)
            or (is_slow and outcome.stream_tokens_s < (1 + _FLAT) * before.stream_tokens_s)
        )

    def _least(self, fleets: Sequence[Fleet]) -> None:
        """The first of them that meets the goals is the best; the last one does."""
        low, high = 0, len(fleets) - 1
        while low < high:
            middle = (low + high) // 2
            if self.meets(fleets[middle]):
                high = middle
                self.best = fleets[high]
            else:
                low = middle + 1


def _beside(ladder: Sequence[int], value: int) -> list[int]:
    """The steps before and after."""
    at = ladder.index(value)
    return [ladder[place] for place in (at - 1, at + 1) if 0 <= place < len(ladder)]
