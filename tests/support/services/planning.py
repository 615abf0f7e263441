"""What tests of plans share: executors without a stream, requests, and a policy whose placements are done."""

from collections.abc import Iterable

from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.placement.placer import PlacementSettings
from scheduler.dispatch.policy import Placement, Policy
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.residency import Copy, Residency, Tier
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report

MODULES = frozenset({"q_proj"})


def executor(
    address: str = "a:1", seats: int = 8, slots: int = 4, rank: int = 16, length: int = 1024, **resident: Tier
) -> ExecutorState:
    """One that is ready and empty."""
    state = ExecutorState(address, phase=Phase.READY)
    state.limits = Limits(length, rank, MODULES, max_loras=slots, max_seats=seats)
    state.residency = Residency.from_snapshot(
        0, [Copy(digest, tier, 0, 1, False) for digest, tier in resident.items()]
    )
    state.reported(Report(free_seats=seats, free_slots=slots))
    return state


def request(
    number: int,
    digest: str = "",
    tenant: str = "t",
    *,
    rank: int = 8,
    priority: int = 0,
    cost: int = 1,
    avoid: Iterable[str] = (),
    refused: Iterable[str] = (),
    length: int = 0,
    arrived: float = 0.0,
    session: str = "",
) -> Waiting:
    """A request for the base model, or for a version of some rank."""
    return Waiting(
        number=number,
        tenant=tenant,
        digest=digest,
        priority=priority,
        cost=cost,
        max_rank=rank if digest else 0,
        modules=MODULES if digest else frozenset(),
        avoid=frozenset(avoid),
        refused=frozenset(refused),
        max_length=length,
        session=session,
        arrived=arrived,
    )


def queue_of(*requests: Waiting) -> Queue:
    queue = Queue(1000, 1000)
    for item in requests:
        assert queue.add(item) is None
    return queue


class Fleet:
    """Some executors and the policy that fills them. Whatever is planned is done at once, and checked."""

    def __init__(
        self,
        queue: Queue,
        *states: ExecutorState,
        aging_s: float = 1.0,
        reserve: int = 0,
        placement: PlacementSettings | None = None,
    ) -> None:
        self.queue = queue
        self.states = {state.name: state for state in states}
        self.index = FleetIndex(states, reserve)
        self.policy = Policy(queue, self.index, aging_s, placement=placement)

    def leave(self, name: str) -> None:
        """It has gone, and what ran there with it."""
        self.index.leave(self.index.states.index(self.states.pop(name)))

    def plan(self, now: float = 0.0) -> list[Placement]:
        placed = []
        while (placement := self.policy.next(now)) or self.policy.has_more:
            if placement is None:
                continue
            item = self.queue.take(placement.number, placement.address if self.policy.in_turn else "")
            state = self.states[placement.address]
            state.sent(str(item.number), item.digest, now, item.tenant)
            placed.append(placement)
        self.check()
        return placed

    def numbers(self, now: float = 0.0) -> list[int]:
        """What is planned, without where."""
        return [placement.number for placement in self.plan(now)]

    def check(self) -> None:
        """After a plan: raises AssertionError when an index is wrong, or something that can run waits."""
        self.queue.check()
        self.index.check()
        self.policy.check()
        for state in self.states.values():
            state.check()


def plan(queue: Queue, *states: ExecutorState) -> list[Placement]:
    """What a new policy sends."""
    return Fleet(queue, *states).plan()
