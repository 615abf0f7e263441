"""What goes out next, to whom, and what executors are told: the planner without an event loop. Pure.

`scheduler/dispatch/planner.py` asks it on the event loop, and `scheduler/simulate` on virtual time.
"""

from typing import NamedTuple

from scheduler.dispatch.cold import LASTS_S
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.policy import Placement, Policy
from scheduler.dispatch.queue import Queue
from scheduler.fleet.residency import BASE


class Hint(NamedTuple):
    """Tell that executor that a version will be needed there in so many seconds, about, by so many."""

    address: str  # The executor's name.
    digest: str
    need_by_s: float
    uses: int


class Wait(NamedTuple):
    """Tell that executor for how long a version has waited for a slot there, for so many requests; 0 takes it
    back. It holds for `lasts_s`."""

    address: str  # The executor's name.
    digest: str
    uses: int
    waiting_s: float
    lasts_s: float


class Planning:
    """Who asks acts on each answer before asking for the next one; times are in seconds of one clock."""

    def __init__(self, queue: Queue, policy: Policy) -> None:
        self.queue = queue
        self.policy = policy  # For reading.
        self._new_groups: dict[str, None] = {}

    def arrive(self, request: Waiting) -> None:
        """Queues a request for which there is room, as whoever asks has made sure. If it is the first of its
        version, a likely executor is told, unless the next plan finds room at once. Raises ValueError where
        there is no room even for what was accepted before."""
        if request.digest != BASE and not self.queue.group_size(request.digest):
            self._new_groups[request.digest] = None
        if full := self.queue.add(request, again=True):
            raise ValueError(f"the queue has no room for request {request.number}: {full}")

    def next(self, now: float) -> Placement | None:
        """Which request goes to which executor now; None when nothing can, or `has_more` is set."""
        return self.policy.next(now)

    @property
    def has_more(self) -> bool:
        """The last `next` stopped early."""
        return self.policy.has_more

    def take(self, placement: Placement) -> Waiting:
        """Takes the request off the queue: from here on it is the executor's."""
        return self.queue.take(placement.number, placement.address if self.policy.in_turn else "")

    @property
    def may_hint(self) -> bool:
        """Whether somebody began to wait for a version that no hint was asked for yet."""
        return bool(self._new_groups)

    def hint(self) -> Hint | None:
        """Looks at one such version: whom to tell of it, if somebody waits for it still."""
        digest, _ = self._new_groups.popitem()
        uses = self.queue.group_size(digest)
        target = self.policy.likely(digest) if uses else None
        return Hint(target.name, digest, self.policy.room_in_s(target), uses) if target else None

    def tend(self, now: float) -> list[Wait]:
        """A few times a second: who has waited for long for a slot, and where."""
        return [
            Wait(
                notice.address, notice.digest, self.queue.group_size(notice.digest), notice.waiting_s, LASTS_S
            )
            for notice in self.policy.tend(now)
        ]
