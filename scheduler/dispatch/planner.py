"""When waiting requests go out to executors, and what goes out together.

What goes out is decided in planning.py; here is what needs the event loop.
"""

import asyncio
import uuid
from collections.abc import Callable

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.journal import Journal
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.planning import Planning
from scheduler.dispatch.policy import Placement
from scheduler.fleet.fleet import Fleet
from scheduler.metrics import Metrics

SLICE_S = 0.008
"""A plan holds the event loop for about this long at a time; what is left goes on in the loop's next turn."""


class Planner:
    """Asks the policy whenever something may have changed, and does what it says. On the event loop only."""

    def __init__(
        self,
        planning: Planning,
        fleet: Fleet,
        accepted: LiveRequests,
        metrics: Metrics,
        journal: Journal,
        clock: Callable[[], float],
        pause_s: float,
        fail: Callable[[LiveRequest, Exception], None],
    ) -> None:
        """`pause_s`: after a plan that sent something, until the next one. `fail` ends a request for which no
        dispatch can be made."""
        self._planning = planning
        self._fleet = fleet
        self._accepted = accepted
        self._metrics = metrics
        self._journal = journal
        self._clock = clock
        self._pause_s = pause_s
        self._fail = fail
        self._scheduled = False
        self._next_at = 0.0  # On the event loop's clock.

    def wake(self) -> None:
        """Plans once, at once or a moment after the last batch: requests that come together go out together.

        A batch costs both sides about as much as one request does.
        """
        if not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._next_at), self._plan)

    def tend(self) -> None:
        """A few times a second: tells executors who has waited long for a slot there."""
        for wait in self._planning.tend(self._clock()):
            self._fleet.tell_wait(*wait)
        self._metrics.passed_over.set(self._planning.policy.cold.num_overdue)

    def send(self, live: LiveRequest, address: str) -> None:
        """Dispatches a request that is not in the queue, at once."""
        try:
            dispatch = self._attempt(live, address)
        except Exception as error:  # Whoever calls this has others to look after.
            self._fail(live, error)
        else:
            self._fleet.dispatch(address, [dispatch])

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + SLICE_S
        try:
            sent, done = self._send_until(ends_at)
        finally:
            self._scheduled = False
        if sent:
            self._next_at = loop.time() + self._pause_s
        if done:
            done = self._hint_until(ends_at)
        self._metrics.queue_length.set(len(self._planning.queue))
        self._metrics.groups.set(self._planning.queue.num_groups)
        if not done:
            self._scheduled = True
            loop.call_soon(self._plan)

    def _send_until(self, ends_at: float) -> tuple[bool, bool]:
        """Whether something was sent, and whether nothing is left that can run."""
        loop = asyncio.get_running_loop()
        batches: dict[str, list[executor_pb2.Dispatch]] = {}
        try:
            while placement := self._planning.next(self._clock()):
                self._add_to(batches, placement)
                if loop.time() >= ends_at:
                    break
        finally:  # What was placed before a bug in the policy counts as sent.
            for address, batch in batches.items():
                batch.sort(key=lambda dispatch: dispatch.digest)  # Requests of one version stand together.
                self._fleet.dispatch(address, batch)
        return bool(batches), placement is None and not self._planning.has_more

    def _add_to(self, batches: dict[str, list[executor_pb2.Dispatch]], placement: Placement) -> None:
        live = self._accepted[placement.number]
        try:
            dispatch = self._begin(live, placement)
        except Exception as error:  # A bug with one request must not hold up all others.
            self._fail(live, error)
        else:
            batches.setdefault(placement.address, []).append(dispatch)

    def _begin(self, live: LiveRequest, placement: Placement) -> executor_pb2.Dispatch:
        """From here on the request is the executor's."""
        self._planning.take(placement)
        return self._attempt(live, placement.address)

    def _attempt(self, live: LiveRequest, address: str) -> executor_pb2.Dispatch:
        now, waiting = self._clock(), live.waiting
        left_s = live.time_limit_left_s(now)
        dispatch_id = uuid.uuid4().hex
        left_ms = 0 if left_s is None else max(1, round(left_s * 1000))
        waited_ms = round((now - live.accepted_at) * 1000)
        dispatch = live.progress.dispatch(dispatch_id, left_ms, waited_ms)
        tier = self._fleet.tier(address, waiting.digest)
        self._fleet.promise(address, dispatch_id, waiting.digest, waiting.tenant)
        self._accepted.begin_attempt(live, dispatch_id, address)
        live.attempts += 1
        self._journal.dispatched(live, now, tier)
        return dispatch

    def _hint_until(self, ends_at: float) -> bool:
        """Whether all hints were sent."""
        loop = asyncio.get_running_loop()
        while self._planning.may_hint:
            if loop.time() >= ends_at:
                return False
            if hint := self._planning.hint():
                self._fleet.prefetch(*hint)
                self._metrics.prefetch_hints.inc()
        return True
