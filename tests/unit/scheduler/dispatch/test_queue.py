from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.queue import Queue
from scheduler.dispatch.shares import Shares
from tests.support.services.planning import request


def waiting(
    number: int, tenant: str = "t", digest: str = "", priority: int = 0, cost: int = 1, arrived: float = 0.0
) -> Waiting:
    return request(number, digest, tenant, priority=priority, cost=cost, arrived=arrived)


def drain(queue: Queue, count: int) -> list[int]:
    """Takes `count` requests in fair order."""
    numbers = []
    for _ in range(count):
        turns = (queue.turn(lane) for lane in queue.all_lanes())
        numbers.append(queue.take(min(turn for turn in turns if turn)[3]).number)
        queue.check()
    return numbers


def full_price(**settings: Any) -> Queue:
    return Queue(1000, 1000, prompt_token_price=1.0, **settings)


def test_priority_then_arrival_within_a_tenant() -> None:
    queue = Queue(10, 10)
    for number, priority in [(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)]:
        assert queue.add(waiting(number, priority=priority)) is None
    assert drain(queue, 5) == [2, 4, 1, 3, 5]


def test_says_which_bound_is_full() -> None:
    queue = Queue(max_total=3, max_per_tenant=2)
    assert queue.add(waiting(1, "a")) is None
    assert queue.add(waiting(2, "a")) is None
    assert queue.add(waiting(3, "a")) == "tenant"
    assert queue.add(waiting(4, "b")) is None
    assert queue.add(waiting(5, "c")) == "total"
    assert len(queue) == 3


def test_what_comes_back_takes_its_former_place_even_when_full() -> None:
    queue = Queue(2, 2)
    queue.add(waiting(1))
    queue.add(waiting(2))
    first = queue.take(1)
    queue.add(waiting(3))
    queue.put_back(first)
    assert len(queue) == 3
    assert drain(queue, 3) == [1, 2, 3]


def test_a_flood_does_not_delay_another_tenant() -> None:
    queue = full_price()
    for number in range(50):
        queue.add(waiting(number, "flood"))
    drain(queue, 10)
    queue.add(waiting(90, "late"))
    queue.add(waiting(91, "late"))
    assert {90, 91} <= set(drain(queue, 4))


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    queue = full_price()
    for number in range(100):
        queue.add(waiting(number, "busy", cost=10))
    drain(queue, 50)
    for number in range(100, 140):
        queue.add(waiting(number, "back", cost=10))
    served_of_back = sum(number >= 100 for number in drain(queue, 20))
    assert 9 <= served_of_back <= 11


def test_generated_tokens_count_for_the_share() -> None:
    queue = full_price()
    for number in range(10):
        queue.add(waiting(number, "talks"))
        queue.add(waiting(100 + number, "quiet"))
    queue.charge("talks", "", 5)
    assert all(number >= 100 for number in drain(queue, 5))


def test_a_prompt_token_costs_its_price() -> None:
    queue = Queue(100, 100, prompt_token_price=0.25)
    queue.add(waiting(1, "reads", cost=100))
    queue.add(waiting(2, "reads"))
    queue.add(waiting(3, "writes"))
    queue.add(waiting(4, "writes"))
    assert drain(queue, 1) == [1]
    queue.charge("writes", "", 24)
    assert drain(queue, 1) == [3]
    queue.charge("writes", "", 1)
    assert drain(queue, 1) == [2]


def test_a_tenant_gets_as_much_as_it_weighs() -> None:
    queue = full_price(weights={"big": 3.0})
    for number in range(100):
        queue.add(waiting(number, "big", cost=10))
        queue.add(waiting(100 + number, "small", cost=10))
    assert 14 <= sum(number < 100 for number in drain(queue, 20)) <= 16


def test_another_weight_counts_at_once_and_charges_nothing_again() -> None:
    """What came back was charged by the weight of then, and goes first for that."""
    weights = {"changes": 1.0, "small": 1.0}
    queue = Queue(1000, lambda tenant: 100, prompt_token_price=1.0, weights=weights.__getitem__)
    for number in range(100):
        queue.add(waiting(number, "changes", cost=10))
        queue.add(waiting(100 + number, "small", cost=10))
    assert queue.full("small") == "tenant" and queue.full("another") is None
    taken = queue.take(0)
    queue.put_back(taken)
    weights["changes"] = 3.0
    served = queue.served("changes")
    assert drain(queue, 1) == [0] and queue.served("changes") == served
    assert 14 <= sum(number < 100 for number in drain(queue, 20)) <= 16
    queue.check()


def test_a_flood_on_one_version_does_not_delay_another_of_the_same_tenant() -> None:
    queue = full_price()
    for number in range(50):
        queue.add(waiting(number, digest="flooded"))
    drain(queue, 10)
    queue.add(waiting(90, digest="quiet"))
    queue.add(waiting(91, digest="quiet"))
    assert {90, 91} <= set(drain(queue, 4))


def test_a_version_that_waits_long_pushes_nobody_back() -> None:
    """What others are served meanwhile is no debt of those who come later."""
    queue = full_price()
    queue.add(waiting(1, "blocked", digest="cold"))
    for number in range(10, 60):
        queue.add(waiting(number, "busy"))
    for number in range(10, 40):  # All that can run.
        queue.take(number)
    queue.add(waiting(100, "late"))
    queue.add(waiting(101, "late"))
    order = drain(queue, 5)
    assert order[0] == 1 and {100, 101} <= set(order)


def test_a_priority_ages_up_to_the_highest_of_its_tenant() -> None:
    queue = full_price(priority_aging_s=5.0)
    queue.add(waiting(1, priority=-3, digest="low"))
    for number in range(10, 30):
        queue.add(waiting(number, priority=2, digest="high"))
    queue.add(waiting(40, "other"))
    queue.age(24.0)
    assert 1 not in drain(queue, 8)
    queue.age(25.0)
    queue.check()
    assert 1 in drain(queue, 3)  # As one of two versions with the same priority.
    queue.age(1000.0)
    queue.check()


def test_only_where_a_priority_has_aged_there_is_something_to_plan() -> None:
    """Else all lanes of a tenant with two priorities would be looked at a few times a second."""
    queue = full_price(priority_aging_s=5.0)
    for number in range(4):
        queue.add(waiting(number, digest=f"v{number}", priority=number % 2))
    queue.age(0.0)
    queue.fresh.clear()
    queue.age(4.0)
    assert not queue.fresh
    queue.age(5.0)
    assert [lane.digest for lane in queue.fresh] == ["v0", "v2"]
    queue.check()


def test_without_aging_priorities_are_strict() -> None:
    queue = full_price(priority_aging_s=0.0)
    queue.add(waiting(1, priority=-1))
    for number in range(10, 20):
        queue.add(waiting(number))
    queue.age(1e6)
    assert drain(queue, 11)[-1] == 1


def test_what_comes_back_has_paid() -> None:
    queue = full_price()
    queue.add(waiting(1, "a", cost=100))
    queue.add(waiting(2, "a", cost=100))
    queue.add(waiting(3, "b", cost=50))
    first = queue.take(1)
    queue.put_back(first)
    assert drain(queue, 1) == [1]
    assert drain(queue, 2) == [3, 2]
    assert queue.served("a") == 200


def test_lengths_that_executors_take_group_requests() -> None:
    queue = Queue(10, 10)
    for number, length in enumerate([10, 100, 101, 5000]):
        queue.add(request(number, "x", length=length))
    assert [lane.size for lane in queue.lanes("x")] == [4]
    queue.follow((100, 1000))
    queue.check()
    assert sorted((lane.needs.max_length, lane.size) for lane in queue.lanes("x"))[:2] == [
        (100, 2),
        (1000, 1),
    ]
    assert queue.group_size("x") == 4


def test_shares_of_those_who_are_gone_are_forgotten() -> None:
    shares = Shares(lambda name: name == "t900")
    for number in range(1000):
        shares.enter(f"t{number}")
        shares.charge(f"t{number}", number)
    assert shares.has_many
    shares.forget_all_but({"t5", "t900"})
    assert [name in shares for name in ("t5", "t6", "t901")] == [True, False, True]
    assert not shares.has_many
    assert shares.of("t6") == 900.0


def test_groups() -> None:
    queue = Queue(10, 10)
    queue.add(waiting(1, "a", "x"))
    queue.add(waiting(2, "b", "x"))
    queue.add(waiting(3, "a", "y", priority=1))
    assert (queue.group_size("x"), queue.group_size("y"), queue.group_size("z")) == (2, 1, 0)
    assert queue.num_groups == 2
    assert [turn[4] for lane in queue.lanes("x") for turn in queue.turns(lane, 8)] == ["a", "b"]
    assert queue.discard(1)
    assert not queue.discard(1)
    assert queue.group_size("x") == 1


def test_taking_what_is_not_there_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Queue(1, 1).take(7)


class QueueMachine(RuleBasedStateMachine):
    """Any order of arrivals, departures and returns keeps the indexes right and loses nobody."""

    inside: Bundle[Waiting] = Bundle("inside")
    outside: Bundle[Waiting] = Bundle("outside")

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(max_total=8, max_per_tenant=5)
        self.expected: dict[int, Waiting] = {}
        self.number = 0
        self.now = 0.0

    @rule(
        target=inside,
        tenant=st.sampled_from("abc"),
        digest=st.sampled_from(["", "x", "y"]),
        priority=st.integers(-2, 2),
        cost=st.integers(0, 100),
    )
    def add(self, tenant: str, digest: str, priority: int, cost: int) -> object:
        self.number += 1
        request = waiting(self.number, tenant, digest, priority, cost, self.now)
        of_tenant = sum(other.tenant == tenant for other in self.expected.values())
        full = self.queue.add(request)
        assert full == ("total" if len(self.expected) >= 8 else "tenant" if of_tenant >= 5 else None)
        if full is None:
            self.expected[request.number] = request
            return request
        return multiple()

    @rule(target=outside, request=consumes(inside), place=st.sampled_from(["", "a:1", "b:1"]))
    def take(self, request: Waiting, place: str) -> Waiting:
        assert self.queue.take(request.number, place) == self.expected.pop(request.number)
        return request

    @rule(digests=st.sets(st.sampled_from(["", "x", "y"])))
    def block(self, digests: set[str]) -> None:
        self.queue.is_blocked = lambda lane: lane.digest in digests

    @rule(target=inside, request=consumes(outside))
    def put_back(self, request: Waiting) -> Waiting:
        self.queue.put_back(request)
        self.expected[request.number] = request
        return request

    @rule(request=consumes(inside))
    def discard(self, request: Waiting) -> None:
        assert self.queue.discard(request.number)
        del self.expected[request.number]

    @rule(tenant=st.sampled_from("abc"), digest=st.sampled_from(["", "x", "y"]), tokens=st.integers(0, 50))
    def charge(self, tenant: str, digest: str, tokens: int) -> None:
        self.queue.charge(tenant, digest, tokens)

    @rule(seconds=st.floats(0, 20))
    def age(self, seconds: float) -> None:
        self.now += seconds
        self.queue.age(self.now)

    @rule(lengths=st.sets(st.integers(0, 3)))
    def follow(self, lengths: set[int]) -> None:
        self.queue.follow(tuple(sorted(lengths)))

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert {request.number for request in self.queue.requests()} == set(self.expected)
        for lane in self.queue.all_lanes():
            in_order = self.queue.turns(lane, 8)
            assert in_order == sorted(in_order)
            assert {turn[4] for turn in in_order} == {r.tenant for r in self.queue.requests_in(lane)}


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30)
