"""A circuit breaker for each executor: who fails what it is sent gets nothing for a while. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.fleet.state import ExecutorState

WINDOW_S = 30.0
PAUSE_S = 5.0
MAX_PAUSE_S = 60.0


@dataclass(slots=True)
class _Circuit:
    """The circuit of one stream of an executor: who comes back begins anew."""

    stream: int
    attempts: deque[tuple[float, bool]]  # When each of the last was judged, and whether it had failed.
    pauses: int = 0  # In a row.
    until: float = 0.0


class Breaker:
    """Trips an executor at `failures` of its last `2 * failures` attempts within 30 s; 0 is never.

    After a pause of 5 s that doubles up to 60 s it is half open: it gets one dispatch. With the first token
    of that one it is open to all again, with a failure there is another pause. Half of the executors that
    serve are tripped at most, and never the last one that takes requests: what all fail is not their fault.
    """

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._circuits: dict[str, _Circuit] = {}

    def served(self, state: ExecutorState, dispatch_id: str, now: float) -> None:
        """An attempt had its first token."""
        self._circuit(state).attempts.append((now, False))
        if _is_probe(state, dispatch_id):
            self._close(state)

    def failed_probe(self, state: ExecutorState, dispatch_id: str, now: float) -> None:
        """An attempt failed, for a reason that need not be the executor's fault."""
        if _is_probe(state, dispatch_id):
            self._pause(self._circuit(state), now)

    def failed(
        self, state: ExecutorState, dispatch_id: str, now: float, states: Sequence[ExecutorState]
    ) -> None:
        """An attempt failed, and the executor is to blame; `dispatch_id` is "" for one of some time ago."""
        circuit = self._circuit(state)
        circuit.attempts.append((now, True))
        self.failed_probe(state, dispatch_id, now)
        if state.tripped:
            return
        if self._failures and _recent(circuit, now) >= self._failures and _may_trip(state, states):
            state.tripped, state.probe = True, ""
            self._pause(circuit, now)

    def tend(self, states: Sequence[ExecutorState], now: float) -> None:
        """A few times a second, and when executors come or go."""
        names = {state.name for state in states}
        self._circuits = {name: circuit for name, circuit in self._circuits.items() if name in names}
        for state in states:
            if not state.tripped:
                continue
            if not any(each.takes_requests for each in states):
                self._close(state)
            elif now >= self._circuit(state).until and not state.half_open and not state.runs(state.probe):
                state.half_open = True

    def _circuit(self, state: ExecutorState) -> _Circuit:
        circuit = self._circuits.get(state.name)
        if circuit is None or circuit.stream != state.streams:
            attempts = deque[tuple[float, bool]](maxlen=max(1, 2 * self._failures))
            circuit = self._circuits[state.name] = _Circuit(state.streams, attempts)
        return circuit

    def _pause(self, circuit: _Circuit, now: float) -> None:
        circuit.until = now + min(MAX_PAUSE_S, PAUSE_S * 2.0 ** min(circuit.pauses, 16))
        circuit.pauses += 1

    def _close(self, state: ExecutorState) -> None:
        self._circuits.pop(state.name, None)
        state.tripped = state.half_open = False


def _is_probe(state: ExecutorState, dispatch_id: str) -> bool:
    return state.tripped and dispatch_id != "" and state.probe == dispatch_id


def _recent(circuit: _Circuit, now: float) -> int:
    return sum(has_failed and now - at <= WINDOW_S for at, has_failed in circuit.attempts)


def _may_trip(state: ExecutorState, states: Sequence[ExecutorState]) -> bool:
    serving = [each for each in states if each.serves]
    tripped = sum(each.tripped for each in serving) + 1
    return tripped <= len(serving) // 2 and any(each.takes_requests for each in serving if each is not state)
