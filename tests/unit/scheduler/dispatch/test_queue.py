import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from scheduler.dispatch.queue import Queue, Waiting


def waiting(number: int, tenant: str = "t", digest: str = "", priority: int = 0, cost: int = 1) -> Waiting:
    return Waiting(number, tenant, digest, priority, cost, max_rank=0, modules=frozenset())


def drain(queue: Queue, count: int) -> list[int]:
    """Takes `count` requests in fair order."""
    numbers = []
    for _ in range(count):
        tenant = min(queue.tenants(), key=lambda name: (queue.served(name), name))
        head = queue.head(tenant)
        assert head is not None
        numbers.append(queue.take(head.number).number)
    return numbers


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
    queue = Queue(100, 100)
    for number in range(50):
        queue.add(waiting(number, "flood"))
    drain(queue, 10)
    queue.add(waiting(90, "late"))
    queue.add(waiting(91, "late"))
    assert {90, 91} <= set(drain(queue, 4))


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    queue = Queue(1000, 1000)
    for number in range(100):
        queue.add(waiting(number, "busy", cost=10))
    drain(queue, 50)
    for number in range(100, 140):
        queue.add(waiting(number, "back", cost=10))
    served_of_back = sum(number >= 100 for number in drain(queue, 20))
    assert 9 <= served_of_back <= 11


def test_generated_tokens_count_for_the_share() -> None:
    queue = Queue(100, 100)
    for number in range(10):
        queue.add(waiting(number, "talks"))
        queue.add(waiting(100 + number, "quiet"))
    queue.charge("talks", 5)
    assert all(number >= 100 for number in drain(queue, 5))


def test_groups() -> None:
    queue = Queue(10, 10)
    queue.add(waiting(1, "a", "x"))
    queue.add(waiting(2, "b", "x"))
    queue.add(waiting(3, "a", "y", priority=1))
    assert (queue.group_size("x"), queue.group_size("y"), queue.group_size("z")) == (2, 1, 0)
    assert queue.num_groups == 2
    assert [head.number for head in queue.group_heads("a")] == [3, 1]
    assert queue.group_head("b", "y") is None
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

    @rule(
        target=inside,
        tenant=st.sampled_from("abc"),
        digest=st.sampled_from(["", "x", "y"]),
        priority=st.integers(-2, 2),
        cost=st.integers(0, 100),
    )
    def add(self, tenant: str, digest: str, priority: int, cost: int) -> object:
        self.number += 1
        request = waiting(self.number, tenant, digest, priority, cost)
        of_tenant = sum(other.tenant == tenant for other in self.expected.values())
        full = self.queue.add(request)
        assert full == ("total" if len(self.expected) >= 8 else "tenant" if of_tenant >= 5 else None)
        if full is None:
            self.expected[request.number] = request
            return request
        return multiple()

    @rule(target=outside, request=consumes(inside))
    def take(self, request: Waiting) -> Waiting:
        assert self.queue.take(request.number) == self.expected.pop(request.number)
        return request

    @rule(target=inside, request=consumes(outside))
    def put_back(self, request: Waiting) -> Waiting:
        self.queue.put_back(request)
        self.expected[request.number] = request
        return request

    @rule(request=consumes(inside))
    def discard(self, request: Waiting) -> None:
        assert self.queue.discard(request.number)
        del self.expected[request.number]

    @rule(tenant=st.sampled_from("abc"), tokens=st.integers(0, 50))
    def charge(self, tenant: str, tokens: int) -> None:
        self.queue.charge(tenant, tokens)

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert {request.number for request in self.queue.requests()} == set(self.expected)
        for tenant in self.queue.tenants():
            orders = [request.order for request in self.expected.values() if request.tenant == tenant]
            head = self.queue.head(tenant)
            assert head is not None and head.order == min(orders)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30)
