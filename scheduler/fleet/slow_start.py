"""An executor that joins others at work gets its seats bit by bit, while it warms up. Pure."""

import math
from collections.abc import Sequence

from scheduler.fleet.state import ExecutorState, Phase

MAX_SEEN = 4096

Start = tuple[str, str]
"""An executor's name, and which start of it."""


class SlowStart:
    """A share of the seats that grows evenly for `seconds` from the first report as ready; 0 is none of this.

    Whoever starts beside others gets at once all that waits, having the most room of all: cold, and with
    prefills only. Who was ready before, and was away for a while, does not warm up again. Nobody does in a
    fleet that begins, or begins anew: there is nobody else to do the work meanwhile.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._serving_since: float | None = None
        self._seen: dict[Start, None] = {}  # The last ones.
        self._began: dict[Start, float] = {}  # Those that warm up.

    def tend(self, states: Sequence[ExecutorState], now: float) -> None:
        """At each change of a phase, and a few times a second. `now` is on any clock, in seconds."""
        others = [state for state in states if state.serves and _start(state) not in self._began]
        is_old = self._serving_since is not None and now - self._serving_since >= self._seconds
        for state in states:
            if state.phase is Phase.READY:
                self._look(state, now, warms_up=is_old and others != [state])
        if not others:
            self._serving_since = None
        elif self._serving_since is None:
            self._serving_since = now
        here = {_start(state): state for state in states}
        self._began = {start: at for start, at in self._began.items() if start in here}
        for start, began in list(self._began.items()):
            self._grow(here[start], start, now - began if others else self._seconds)
        for start, state in here.items():
            if start not in self._began and state.seat_limit is not None:
                state.seat_limit = None

    def _look(self, state: ExecutorState, now: float, *, warms_up: bool) -> None:
        start = _start(state)
        if start in self._seen:
            return
        self._seen[start] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        if warms_up and self._seconds:
            self._began[start] = now

    def _grow(self, state: ExecutorState, start: Start, age: float) -> None:
        if age >= self._seconds:
            del self._began[start]
        elif state.limits:
            state.seat_limit = max(1, math.ceil(state.limits.max_seats * age / self._seconds))


def _start(state: ExecutorState) -> Start:
    return state.name, state.instance_id
