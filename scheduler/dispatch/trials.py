"""Trials of requests that may crash executors: one at a time on an executor, alone among the unproven.

Unproven is an attempt that has had no token yet. Whatever crashes an executor before its first token, one of
the unproven there does; those with progress have run for a while. A request in flight at `SUSPECT_CRASHES`
crashes in a row, unproven each time, is a suspect. It goes no more through the queue: an executor is closed
to new requests until all that run there are proven, gets the suspect, and is open again at its first token or
its end. When it crashes meanwhile, only the suspect can be the cause.

So a request that crashes executors ends after `SUSPECT_CRASHES` + 1 crashes, and no other one does: crashes
are no failures, however many there are. Streams that are lost after a pause of this process prove nothing,
since that breaks connections, too. What other schedulers send is not seen here: of two that share an
executor, a request of one may crash it while the other has a trial there.
"""

import math
from collections.abc import Callable

from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.planner import Planner
from scheduler.errors import NoExecutor, SchedulerError, from_exception
from scheduler.fleet.fleet import Fleet
from scheduler.fleet.needs import Needs
from scheduler.fleet.state import ExecutorState
from scheduler.metrics import Metrics

SUSPECT_CRASHES = 2
# Seconds. So late a `tend` says that this process stood still; it may be why streams are lost so long after.
PAUSE_S = 1.0
AFTER_PAUSE_S = 5.0


class Trials:
    """Who waits for a trial, and who has which executor for one. On the event loop only."""

    def __init__(
        self,
        fleet: Fleet,
        accepted: LiveRequests,
        planner: Planner,
        metrics: Metrics,
        timeout_s: float,
        fail: Callable[[LiveRequest, SchedulerError], None],
        clock: Callable[[], float],
        awake: Callable[[], float],
    ) -> None:
        """`timeout_s`: how long a suspect waits while no executor is ready that can run it, on the clock
        `awake`. `clock` goes on while this process stands still."""
        self._fleet = fleet
        self._accepted = accepted
        self._planner = planner
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._fail = fail
        self._clock = clock
        self._awake = awake
        self._tended_at = clock()
        self._paused_until = -math.inf
        self._waiting: dict[int, LiveRequest] = {}  # By number, in the order of their turns.
        self._places: dict[str, LiveRequest] = {}  # By name, also while those there are not proven yet.

    def crashed(self, live: LiveRequest, why: str) -> SchedulerError | None:
        """Its executor is lost and did not drain. Returns what it is to fail with, if it was that."""
        self._note_pause()
        if live.proven or self._clock() < self._paused_until + AFTER_PAUSE_S:
            return None
        live.crashes += 1
        if self._places.get(live.address) is not live:
            return None
        self._metrics.poison(self._state(live.address).phase)
        request = f"request {live.admitted.request_id!r} of tenant {live.waiting.tenant!r}"
        times = f"{live.crashes} crashes of executors, alone at that of {live.address}: {why}"
        return from_exception(RuntimeError(f"{request} was in flight at {times}"))

    def proven(self, live: LiveRequest) -> None:
        """Its attempt has its first token."""
        live.proven = True
        live.crashes = 0
        self.end(live)

    def take(self, live: LiveRequest) -> bool:
        """Whether it waits here from now on, being a suspect, and not in the queue."""
        if live.crashes < SUSPECT_CRASHES:
            return False
        self._waiting[live.waiting.number] = live
        self.begin()
        return True

    def end(self, live: LiveRequest) -> None:
        """Its attempt or it itself is over, wherever it is. Nothing when it is no suspect."""
        self._waiting.pop(live.waiting.number, None)
        if self._places and (address := next((a for a, at in self._places.items() if at is live), "")):
            self._open(address)

    def waiting(self) -> list[int]:
        """Numbers of those that no executor has."""
        placed = [live.waiting.number for live in self._places.values() if not live.dispatch_id]
        return [*self._waiting, *placed]

    def tend(self) -> None:
        """A few times a second, and when an executor comes or goes; also ends what waits too long."""
        self._note_pause()
        for address, live in list(self._places.items()):
            if not live.dispatch_id and not self._state(address).serves:
                self._open(address)
                self._waiting[live.waiting.number] = live
        self.begin()
        now = self._awake()
        for live in list(self._waiting.values()):
            if any(state.serves and _can_run(state, live.waiting) for state in self._fleet.states):
                live.served_at = now
            elif now - live.served_at >= self._timeout_s:
                self._fail(live, live.refusal or NoExecutor("no executor is ready that can run it"))

    def _note_pause(self) -> None:
        now = self._clock()
        if now - self._tended_at >= PAUSE_S:
            self._paused_until = now
        self._tended_at = now

    def begin(self) -> None:
        """Begins the trials that can begin: there is other room, or there are other suspects. Seats that
        another scheduler wants, too, are free for moments only."""
        for live in list(self._waiting.values()):
            self._find_place(live)
        for address, live in list(self._places.items()):
            quiet = self._state(address).free_seats and not self._accepted.any_unproven(address)
            if quiet and not live.dispatch_id:
                self._planner.send(live, address)

    def _find_place(self, live: LiveRequest) -> None:
        """Half of the executors that serve have trials at most, or one, so that others find room, too."""
        serving = [state for state in self._fleet.states if state.serves]
        fitting = [state for state in serving if not state.on_trial and _can_run(state, live.waiting)]
        if fitting and len(self._places) < max(1, len(serving) // 2):
            avoid = live.waiting.avoid
            state = max(fitting, key=lambda each: (each.name not in avoid, each.free_seats))
            del self._waiting[live.waiting.number]
            self._places[state.name] = live
            state.on_trial = True

    def _open(self, address: str) -> None:
        del self._places[address]
        self._state(address).on_trial = False
        self._planner.wake()

    def _state(self, address: str) -> ExecutorState:
        state = self._fleet.state(address)
        if state is None:
            raise LookupError(f"there is no executor {address}")
        return state


def _can_run(state: ExecutorState, request: Waiting) -> bool:
    """Busy or not."""
    if state.limits is None or state.name in request.refused:
        return False
    needs = Needs(
        request.max_rank,
        request.modules,
        request.full_heads,
        request.max_length,
        masked=request.masked,
    )
    return needs.fit(state.limits)
