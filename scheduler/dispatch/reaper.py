"""Ends waiting requests that no executor can run: at once, or when none is ready for too long."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice

from scheduler.dispatch.live_request import LiveRequest
from scheduler.dispatch.live_requests import LiveRequests
from scheduler.dispatch.queue import Queue
from scheduler.errors import IncompatibleAdapter, NoConstraints, NoExecutor, SchedulerError
from scheduler.fleet.fleet import Fleet
from scheduler.fleet.needs import Needs

MAX_A_TURN = 100  # Requests that are ended in one turn of the event loop.


class Reaper:
    """Decides for all that need the same at once, and walks only those that it ends."""

    def __init__(
        self,
        queue: Queue,
        fleet: Fleet,
        accepted: LiveRequests,
        timeout_s: float,
        fail: Callable[[LiveRequest, SchedulerError], None],
    ) -> None:
        """`timeout_s`: how long a request waits while no executor is ready that can run it."""
        self._queue = queue
        self._fleet = fleet
        self._accepted = accepted
        self._timeout_s = timeout_s
        self._fail = fail
        self._scheduled = False
        self._unserved: dict[Needs, float] = {}  # Since when nobody is ready who can run those.
        self._look_at: dict[Needs, float] = {}  # Of those: when the next one will have waited for too long.

    def phase_changed(self, now: float) -> None:
        """Ends what no executor can ever run, in turns of the event loop."""
        if not self._scheduled:
            self._reap(now)

    def sweep(self, now: float) -> None:
        """A few times a second: ends what has waited for too long while nobody was ready for it."""
        self._queue.follow(self._fleet.index.lengths)
        unserved = [needs for needs in self._queue.all_needs() if not self._is_served(needs)]
        self._unserved = {needs: self._unserved.get(needs, now) for needs in unserved}
        self._look_at = {needs: self._look_at.get(needs, now + self._timeout_s) for needs in unserved}
        self.phase_changed(now)

    def why_never(self, live: LiveRequest) -> SchedulerError:
        """Why no executor ever runs it."""
        if refusals := self._fleet.refusals():
            return NoExecutor(refusals)
        if live.refusal:
            return live.refusal
        length = live.waiting.max_length
        if self._fleet.index.longest < length:
            return NoExecutor(f"no executor takes {length} tokens any more, for prompt and answer together")
        if live.waiting.masked and self._fleet.index.may_ever_run(
            self._queue.needs(live.waiting)._replace(masked=False)
        ):
            return NoConstraints("no executor takes constraints, allowed_token_ids or bad_words yet")
        return _incompatible(live)

    def unserved_since(self, needs: Needs) -> float | None:
        """Since when no executor is ready for such requests, as of the last sweep."""
        return self._unserved.get(needs)

    def _hopeless(self) -> list[Needs]:
        refused = self._fleet.refusals() is not None
        index = self._fleet.index
        return [needs for needs in self._queue.all_needs() if refused or not index.may_ever_run(needs)]

    def _is_served(self, needs: Needs) -> bool:
        return bool(self._fleet.index.holders(needs) & self._fleet.index.serving)

    def _reap(self, now: float) -> None:
        self._scheduled = False
        self._queue.follow(self._fleet.index.lengths)  # What is longer than any of them is hopeless.
        ending = list(islice(self._ending(now), MAX_A_TURN + 1))
        for live, why in ending[:MAX_A_TURN]:
            self._fail(live, why(live))
        if len(ending) > MAX_A_TURN:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._reap, now)

    def _ending(self, now: float) -> Iterator[tuple[LiveRequest, Callable[[LiveRequest], SchedulerError]]]:
        """Whom to end, and what makes the error. Who asks may stop before the last one."""
        hopeless = self._hopeless()
        for needs in hopeless:
            for live in self._waiting(needs):
                yield live, self.why_never
        for needs, at in self._look_at.items():
            for live in self._overdue(needs, now) if now >= at and needs not in hopeless else ():
                yield live, self._unready

    def _overdue(self, needs: Needs, now: float) -> Iterator[LiveRequest]:
        """Where there is none, those are not looked at again before somebody can have waited for too long."""
        before = now - self._timeout_s
        found, served_at = False, now
        for live in self._waiting(needs):
            if live.served_at <= before:
                found = True
                yield live
            else:
                served_at = min(served_at, live.served_at)
        if not found:
            self._look_at[needs] = served_at + self._timeout_s

    def _unready(self, live: LiveRequest) -> SchedulerError:
        """Without addresses, which are no tenant's business."""
        cordoned = sum(state.condition == "cordoned" for state in self._fleet.states)
        told = f": {cordoned} of {len(self._fleet.states)} are cordoned" if cordoned else ""
        return live.refusal or NoExecutor(f"no executor is ready that can run it{told}")

    def _waiting(self, needs: Needs) -> Iterator[LiveRequest]:
        for lane in self._queue.lanes_with(needs):
            for request in self._queue.requests_in(lane):
                yield self._accepted[request.number]


def _incompatible(live: LiveRequest) -> IncompatibleAdapter:
    needs = f"rank {live.admitted.max_rank} on {', '.join(sorted(live.admitted.modules))}"
    if live.admitted.full_heads:
        needs += f", and {live.admitted.full_heads} places for full heads (executors' --max-full-heads)"
    return IncompatibleAdapter(
        f"no executor can hold adapter {live.admitted.adapter!r}, which needs {needs}",
        metadata={"adapter": live.admitted.adapter},
    )
