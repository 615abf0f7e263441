"""Lanes in fair order, against a look at all of them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.dispatch.groups import Lane, Waiting
from scheduler.dispatch.lanes import MANY_LANES, FairLanes
from scheduler.dispatch.queue import Queue
from tests.support.services.planning import request

TENANTS = st.sampled_from(["a", "b", "c"])
VERSIONS = st.integers(0, 3 * MANY_LANES).map(str)


class Lanes(RuleBasedStateMachine):
    """Few tenants with many versions each, some of them shared, and all that moves turns."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(1000, 1000, prompt_token_price=1.0, priority_aging_s=1.0, weights={"b": 2.0})
        self.lanes = FairLanes(self.queue)
        self.away: dict[Lane, None] = {}
        self.running: list[Waiting] = []
        self.number = 0
        self.now = 0.0

    @rule(tenant=TENANTS, digest=VERSIONS, priority=st.integers(0, 2), cost=st.integers(1, 9))
    def add(self, tenant: str, digest: str, priority: int, cost: int) -> None:
        self.number += 1
        self.queue.add(request(self.number, digest, tenant, priority=priority, cost=cost, arrived=self.now))

    @precondition(lambda self: self.somebody())
    @rule()
    def take_the_fairest(self) -> None:
        _, lane = self.lanes.first() or pytest.fail("somebody waits")
        turn = self.queue.turn(lane)
        assert turn
        self.running.append(self.queue.take(turn[3]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def come_back(self, which: int) -> None:
        self.queue.put_back(self.running.pop(which % len(self.running)))

    @precondition(lambda self: len(self.queue))
    @rule(which=st.integers(0, 99))
    def discard(self, which: int) -> None:
        numbers = sorted(request.number for request in self.queue.requests())
        self.queue.discard(numbers[which % len(numbers)])

    @rule(tenant=TENANTS, digest=VERSIONS, tokens=st.integers(1, 30))
    def charge(self, tenant: str, digest: str, tokens: int) -> None:
        self.queue.charge(tenant, digest, tokens)

    @rule(seconds=st.floats(0.1, 2))
    def age(self, seconds: float) -> None:
        self.now += seconds
        self.queue.age(self.now)

    @precondition(lambda self: self.somebody())
    @rule()
    def set_the_fairest_aside(self) -> None:
        _, lane = self.lanes.first() or pytest.fail("somebody waits")
        self.lanes.leave(lane)
        self.away[lane] = None

    @rule()
    def bring_back(self) -> None:
        for lane in self.away:
            if lane.size:
                self.lanes.enter(lane)
        self.away.clear()

    def somebody(self) -> bool:
        """Whether somebody waits in a lane that is here."""
        return any(lane not in self.away for lane in self.queue.all_lanes())

    @invariant()
    def the_first_is_the_fairest(self) -> None:
        for lane in self.queue.fresh:
            self.away.pop(lane, None)
            self.lanes.enter(lane)
        self.queue.fresh.clear()
        here = [lane for lane in self.queue.all_lanes() if lane not in self.away]
        first = self.lanes.first()
        assert bool(first) == bool(here)
        if first:
            turn = min(turn for turn in map(self.queue.turn, here) if turn)
            assert first == (turn, min(here, key=lambda lane: self.queue.turn(lane) or turn))


Lanes.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLanes = Lanes.TestCase


def test_a_charge_of_a_tenant_of_many_versions_is_one_step() -> None:
    """Turns are looked up, not each of them put right."""
    queue = Queue(1000, 1000, prompt_token_price=1.0)
    lanes = FairLanes(queue)
    for number in range(200):
        queue.add(request(number, str(number // 2), "ab"[number % 2 if number < 4 else 0], cost=1))
    looks = 0
    turn = queue.turn

    def counted(lane: Lane) -> object:
        nonlocal looks
        looks += 1
        return turn(lane)

    for lane in queue.fresh:
        lanes.enter(lane)
    queue.turn = counted  # type: ignore[method-assign,assignment]
    for _ in range(50):
        queue.charge("a", "0", 10)
        assert lanes.first()
    assert looks < 50 * 5
