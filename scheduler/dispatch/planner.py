"""When waiting requests go out to executors, and what goes out together."""

import asyncio
import uuid
from collections.abc import Callable

from lorafleet.v1 import executor_pb2
from scheduler.dispatch.journal import Journal
from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.policy import Policy, likely_executor
from scheduler.dispatch.queue import Queue
from scheduler.fleet.fleet import Fleet
from scheduler.metrics import Metrics


class Planner:
    """Asks the policy whenever something may have changed, and does what it says. On the event loop only."""

    def __init__(
        self,
        queue: Queue,
        fleet: Fleet,
        accepted: LiveRequests,
        policy: Policy,
        metrics: Metrics,
        journal: Journal,
        clock: Callable[[], float],
        pause_s: float,
    ) -> None:
        """`pause_s`: after a plan that sent something, until the next one."""
        self._queue = queue
        self._fleet = fleet
        self._accepted = accepted
        self._policy = policy
        self._metrics = metrics
        self._journal = journal
        self._clock = clock
        self._pause_s = pause_s
        self._scheduled = False
        self._next_at = 0.0  # On the event loop's clock.
        self._new_groups: set[str] = set()

    def wake(self) -> None:
        """Plans once, at once or a moment after the last batch: requests that come together go out together.

        A batch costs both sides about as much as one request does.
        """
        if not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._next_at), self._plan)

    def group_formed(self, digest: str) -> None:
        """The next plan tells a likely executor of it, unless it finds room at once."""
        self._new_groups.add(digest)

    def _plan(self) -> None:
        self._scheduled = False
        batches: dict[str, list[LiveRequest]] = {}
        for placement in self._policy.plan(self._queue, self._fleet.states, self._clock()):
            batches.setdefault(placement.address, []).append(self._accepted[placement.number])
        for address, batch in batches.items():
            batch.sort(key=lambda live: live.waiting.digest)  # Requests of one version stand together.
            self._fleet.dispatch(address, [self._attempt(live, address) for live in batch])
        if batches:
            self._next_at = asyncio.get_running_loop().time() + self._pause_s
        self._hint()
        self._metrics.queue_length.set(len(self._queue))
        self._metrics.groups.set(self._queue.num_groups)

    def _attempt(self, live: LiveRequest, address: str) -> executor_pb2.Dispatch:
        now = self._clock()
        self._accepted.begin_attempt(live, uuid.uuid4().hex, address)
        live.attempts += 1
        self._journal.dispatched(live, now, self._fleet.tier(address, live.waiting.digest))
        left_s = live.time_limit_left_s(now)
        left_ms = 0 if left_s is None else max(1, round(left_s * 1000))
        return live.progress.dispatch(live.dispatch_id, left_ms, round((now - live.accepted_at) * 1000))

    def _hint(self) -> None:
        for digest in self._new_groups:
            uses = self._queue.group_size(digest)
            target = likely_executor(digest, self._fleet.states) if uses else None
            if target:
                self._fleet.prefetch(target.address, digest, self._policy.room_in_s(target), uses)
                self._metrics.prefetch_hints.inc()
        self._new_groups.clear()
