"""Which failed attempts are the fault of their executors, for the circuit breakers of the fleet."""

from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.rejections import BUSY_REASONS, EXECUTOR_LOST, LOCAL_REASONS, STORE_UNAVAILABLE
from scheduler.fleet.fleet import Fleet

# The fault of the executor, its adapter or its store: the executor's when another one serves the request.
DOUBTFUL_REASONS = LOCAL_REASONS | {STORE_UNAVAILABLE, "ADAPTER_LOAD_TIMEOUT"}
# The request's own.
FAIR_REASONS = frozenset({"INVALID_REQUEST", "NOTHING_TO_DRAW"})
# Nothing that an executor answered: links and drains see to those.
NO_ANSWERS = BUSY_REASONS | {EXECUTOR_LOST}


class Blame:
    """Told of the first token of each attempt, and of each that an executor ends without one it should have.

    An adapter that nobody can run, or a store that is away, would else close one executor after the other.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def served(self, live: LiveRequest) -> None:
        """Those who failed it before are proven wrong."""
        self._fleet.served(live.address, live.dispatch_id)
        for name in live.doubtful - {live.address}:
            self._fleet.failed(name)
        live.doubtful = frozenset()

    def failed(self, live: LiveRequest, reason: str) -> None:
        """While `live` still has the attempt. A half-open executor is judged by any failure."""
        if reason in NO_ANSWERS or reason in FAIR_REASONS:
            return
        if reason in DOUBTFUL_REASONS:
            live.doubtful |= {live.address}
            self._fleet.failed_probe(live.address, live.dispatch_id)
        else:
            self._fleet.failed(live.address, live.dispatch_id)
