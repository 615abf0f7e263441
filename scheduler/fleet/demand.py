"""How many executors the work at hand would fill, for whoever adds and removes them. Pure.

It counts seats and slots: those in use, which executors report for all of their schedulers together, and
those that the requests that wait here need to start in time. deploy/autoscaling/README.md has the formula.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.fleet.state import ExecutorState, Phase

# A request's time in its seat is a mean over about this long.
MEMORY_S = 60.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Seats and slots of executors that serve, and what the work at hand would fill of such executors.

    `running` of them hold what runs, of all schedulers, with one for each that is cordoned: it takes the
    place of one, and would stay where one that serves were removed. `waiting` more let what waits here start
    in time. Both are fractions. `queued_s`: how long what waits takes at the rate at which this scheduler's
    requests run.
    """

    executors: int = 0
    seats: int = 0
    seats_in_use: int = 0
    slots: int = 0
    slots_in_use: int = 0
    running: float = 0.0
    waiting: float = 0.0
    queued_s: float = 0.0


class DemandMeter:
    """Looks every second or so; `last` is what it saw."""

    def __init__(self, filled: float, start_within_s: float) -> None:
        """`filled`: which share of an executor's seats should be in use. `start_within_s`: in which time
        what waits should have started. Both are above 0."""
        self.last = Demand()
        self.seat_s = 0.0  # How long a request holds its seat, on average.
        self._filled, self._start_within_s = filled, start_within_s
        self._looked_at: float | None = None
        self._sent = 0
        self._seat_seconds = 0.0  # Both of this scheduler's requests; what is longer ago counts less.
        self._dispatches = 0.0

    def look(self, now: float, states: Iterable[ExecutorState], waiting: int, cold: int) -> None:
        """`waiting` requests, and `cold` versions that some of them are for and that no executor runs."""
        states = list(states)
        running = sum(state.num_running for state in states)
        self._follow(now, running, sum(state.num_sent for state in states))
        told = [(state.report, state.limits) for state in states if state.serves and state.limits]
        executors = len(told)
        seats = sum(limits.max_seats for _, limits in told)
        slots = sum(limits.max_loras for _, limits in told)
        seats_in_use = max(0, seats - sum(report.free_seats for report, _ in told))
        slots_in_use = max(0, slots - sum(report.free_slots for report, _ in told))
        of_seats = executors / (seats * self._filled) if seats else 0.0
        of_slots = executors / slots if slots else 0.0
        cordoned = sum(state.cordoned and state.phase is Phase.READY for state in states)
        at_once = min(1.0, self.seat_s / self._start_within_s)
        self.last = Demand(
            executors,
            seats,
            seats_in_use,
            slots,
            slots_in_use,
            running=cordoned * bool(executors) + max(seats_in_use * of_seats, slots_in_use * of_slots),
            waiting=max(waiting * of_seats, cold * of_slots) * at_once,
            queued_s=waiting * self.seat_s / max(1, running),
        )

    def _follow(self, now: float, running: int, sent: int) -> None:
        """Requests leave as fast as they come, so a seat's time is seats over dispatches, each by time."""
        passed = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        kept = math.exp(-passed / MEMORY_S)
        self._seat_seconds = self._seat_seconds * kept + running * passed
        # Streams that ended take their counts along.
        self._dispatches = self._dispatches * kept + max(0, sent - self._sent)
        self._looked_at, self._sent = now, sent
        if self._dispatches >= 1:
            self.seat_s = self._seat_seconds / self._dispatches
