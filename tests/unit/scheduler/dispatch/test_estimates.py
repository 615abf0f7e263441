"""How long a request is expected to take: by what is ahead of it, and only where enough is known."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.dispatch.estimates.answers import MAX_KNOWN, Answers
from scheduler.dispatch.estimates.drains import ENOUGH, Drains
from scheduler.dispatch.estimates.estimator import Estimate, Estimator
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.rates import UNKNOWN, Rates
from scheduler.fleet.residency import Copy, Tier
from scheduler.fleet.state import ExecutorState
from tests.support.services.planning import executor, request

RATES = Rates(token_interval=0.01, tokens=800, prompt_tokens=10_000, page_in=0.002, load=0.3)
ANSWER = 100  # Tokens of every answer that has ended.


class House:
    """Executors, the queue before them, and an estimator that has seen answers of `ANSWER` tokens."""

    def __init__(
        self, *states: ExecutorState, full: bool = True, rates: Rates = RATES, known: bool = True
    ) -> None:
        self.states = states or (executor("a:1"), executor("b:1"))
        for state in self.states:
            self.tell(state, rates)
            for seat in range(state.free_seats if full else 0):
                state.sent(f"{state.address}-{seat}", "")
        self.queue = Queue(100_000, 100_000)
        self.index = FleetIndex(self.states)
        self.answers = Answers()
        for _ in range(50 if known else 0):
            self.answers.ended("t", "", 10, ANSWER, stopped=False)
        self.estimator = Estimator(self.queue, self.index, self.answers, prompt_token_price=0.5)
        self._numbers = iter(range(1, 1 << 30))

    def tell(self, state: ExecutorState, rates: Rates) -> None:
        state.reported(replace(state.report, received=state.num_sent, rates=rates))

    def waits(
        self, count: int, digest: str = "", tenant: str = "t", priority: int = 0, most: int = ANSWER
    ) -> None:
        for _ in range(count):
            number, length = next(self._numbers), 10 + most
            asked = request(number, digest, tenant, priority=priority, cost=10, length=length)
            assert self.queue.add(asked) is None

    def ask(self, digest: str = "", tenant: str = "t", priority: int = 0, cost: int = 10) -> Waiting:
        return request(next(self._numbers), digest, tenant, priority=priority, cost=cost)

    def estimate(self, asked: Waiting, most: int = ANSWER, now: float = 100.0) -> Estimate | None:
        return self.estimator.estimate(asked, most, now)

    def start(self, asked: Waiting, now: float = 100.0) -> float:
        estimate = self.estimate(asked, now=now)
        assert estimate is not None
        return estimate.start


def test_a_line_takes_what_its_tokens_take() -> None:
    """Two executors of 8 seats and 10 ms a token make 1,600 tokens a second: 16 answers of 100."""
    house = House()
    assert house.start(house.ask()) == pytest.approx(1 / 16)
    house.waits(32)
    estimate = house.estimate(house.ask(cost=1000))
    assert estimate is not None
    assert estimate.start == pytest.approx(33 / 16)
    assert estimate.first_token == pytest.approx(33 / 16 + 0.1 + 0.01)
    assert estimate.end == pytest.approx(estimate.first_token + 0.99)


def test_those_that_wait_take_no_more_than_they_may() -> None:
    """However long the answers were that ended before: there are others that ask now."""
    house = House()
    house.waits(32, most=4)
    assert house.start(house.ask()) == pytest.approx((32 * 4 + ANSWER) / 1600)
    house.waits(32, tenant="other", most=4)
    assert house.start(house.ask(tenant="third")) < (64 * 4 + ANSWER) / 1600


def test_nothing_is_said_where_a_seat_is_free() -> None:
    house = House(full=False)
    house.waits(500)
    assert house.estimate(house.ask()) is None
    assert house.estimate(house.ask("x")) is None


def test_nothing_is_said_before_answers_have_ended() -> None:
    house = House(known=False)
    house.waits(500)
    assert house.estimate(house.ask()) is None


def test_nothing_is_said_while_one_that_could_run_it_does_not_tell_its_speed() -> None:
    house = House()
    house.waits(500)
    assert house.estimate(house.ask()) is not None
    house.tell(house.states[1], UNKNOWN)
    assert house.estimate(house.ask(), now=101.0) is None


def test_nothing_is_said_of_a_version_that_lacks_a_slot() -> None:
    """Its line is another one: cold.py."""
    house = House(executor("a:1", slots=1), full=False)
    house.states[0].sent("x", "x")
    house.waits(10, "y")
    assert house.estimate(house.ask("y")) is None


def test_nothing_is_said_of_who_runs_on_few_executors_only() -> None:
    house = House(*[executor(f"{n}:1", rank=4) for n in range(3)], executor("large:1", rank=64))
    assert house.estimate(house.ask()) is not None
    assert house.estimate(replace(house.ask("x"), max_rank=32)) is None


def test_nobody_is_expected_where_nobody_takes_requests() -> None:
    house = House()
    for state in house.states:
        state.cordoned = True
    assert house.estimate(house.ask()) is None


def test_a_version_that_has_to_come_takes_longer() -> None:
    """Two slots are free on each executor, and no seat."""
    house = House(executor("a:1"))
    near = house.estimate(house.ask(""))
    far = house.estimate(house.ask("far"))
    state = house.states[0]
    assert state.moved(1, [Copy("host", Tier.HOST, 0, 1, False)], [], 0.0)
    host = house.estimate(house.ask("host"))
    assert state.moved(2, [Copy("slot", Tier.SLOT, 0, 1, False)], [], 0.0)
    slot = house.estimate(house.ask("slot"))
    assert near and far and host and slot
    assert slot.first_token == pytest.approx(near.first_token)
    assert host.first_token == pytest.approx(near.first_token + 0.002)
    assert far.first_token == pytest.approx(near.first_token + 0.302)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)), max_size=12))
def test_more_ahead_is_never_faster(ahead: list[tuple[int, int, int]]) -> None:
    """Whoever they are: of any tenant, for any version."""
    house, before = House(), 0.0
    for tenant, digest, count in ahead:
        house.waits(count, f"{digest}" if digest else "", f"t{tenant}")
        estimate = House.start(house, house.ask("", "t0"))
        assert estimate >= before - 1e-9
        before = estimate


def test_a_higher_priority_waits_for_its_equals_only() -> None:
    house = House()
    house.waits(64)
    house.waits(16, priority=2)
    low, high = house.start(house.ask()), house.start(house.ask(priority=2))
    assert low == pytest.approx(81 / 16)
    assert high == pytest.approx(17 / 16)


def test_a_light_tenant_does_not_wait_for_the_flood_of_another() -> None:
    house = House()
    house.waits(4000, tenant="flood")
    house.waits(10, tenant="light")
    assert house.start(house.ask(tenant="flood")) > 200
    assert house.start(house.ask(tenant="light")) < 3
    assert house.start(house.ask(tenant="new")) < 1


def test_a_light_version_does_not_wait_for_the_flood_of_another() -> None:
    house = House(executor("a:1", slots=8), executor("b:1", slots=8))
    house.waits(4000, "flood")
    house.waits(2, "light")
    assert house.start(house.ask("flood")) > 200
    assert house.start(house.ask("light")) < 1


def test_many_tenants_are_looked_at_together_and_a_change_is_seen_soon() -> None:
    house = House()
    for tenant in range(200):
        house.waits(5, tenant=f"t{tenant}")
    first = house.start(house.ask(tenant="t7"))
    assert first == pytest.approx(1000 / 16, rel=0.1)
    house.waits(5, tenant="t7")
    assert house.start(house.ask(tenant="t7")) == pytest.approx(1000 / 16 + 5 / 16, rel=0.1)
    for tenant in range(200):
        house.waits(5, tenant=f"t{tenant}")
    assert house.start(house.ask(tenant="t7"), now=101.0) > 1.8 * first


def test_a_fleet_that_was_idle_a_moment_ago_is_not_taken_for_slow() -> None:
    """What it did then says little of what it does with all seats taken."""
    house = House(rates=replace(RATES, tokens=100))
    house.waits(16)
    assert house.start(house.ask()) == pytest.approx(17 / 16)


def test_one_that_is_slow_for_now_makes_not_all_slow() -> None:
    """It has compiled something, or stood still; three in four tokens and more come from the others."""
    house = House(*[executor(f"{n}:1") for n in range(4)])
    slow = house.states[0]
    slow.report = replace(slow.report, rates=replace(RATES, token_interval=1.0))
    estimate = house.estimate(house.ask())
    assert estimate is not None and estimate.end < 2.0


def test_those_that_run_have_no_more_to_do_than_they_may() -> None:
    house = House(rates=replace(RATES, answer_tokens_left=80))
    assert house.start(house.ask()) == pytest.approx(20 / 1600)


def test_those_that_come_later_and_go_first_are_learned_from_what_leaves() -> None:
    """Of a version with many waiting, one a second leaves, whatever the queue says."""
    house = House()
    first = house.ask("x")
    house.start(first, now=100.0)
    assert house.queue.add(first) is None
    house.waits(20, "x")
    for _ in range(8):
        house.estimator.left(first)
    assert house.start(house.ask("x"), now=108.0) == pytest.approx(21.0)


def test_what_left_before_nobody_waited_tells_nothing_of_a_burst_that_comes_later() -> None:
    """Its first requests are in the queue for a moment before they have their seats."""
    house = House()
    last = house.ask("x")
    house.start(last, now=100.0)
    house.waits(20, "x")
    for _ in range(8):
        house.estimator.left(last)
    for waiting in list(house.queue.requests()):
        house.queue.discard(waiting.number)
    house.estimator.left(last)
    house.waits(15, "x")
    assert house.start(house.ask("x"), now=160.0) == pytest.approx(1.0)


class TestDrains:
    def test_it_says_nothing_before_some_have_left(self) -> None:
        drains = Drains()
        assert drains.wait(("t", "x"), 0, 0.0) is None
        for _ in range(int(ENOUGH) - 1):
            drains.left(("t", "x"))
        assert drains.wait(("t", "x"), 10, 2.0) is None
        drains.left(("t", "x"))
        assert drains.wait(("t", "x"), 10, 2.0) == pytest.approx(5.0)

    def test_a_count_begins_anew_when_nobody_waits(self) -> None:
        drains = Drains()
        drains.wait(("t", "x"), 0, 0.0)
        for _ in range(100):
            drains.left(("t", "x"))
        drains.wait(("t", "x"), 0, 50.0)
        assert drains.wait(("t", "x"), 5, 51.0) is None

    def test_what_left_long_ago_counts_less(self) -> None:
        drains = Drains()
        drains.wait(("t", "x"), 0, 0.0)
        for second in range(1, 200):
            for _ in range(1 if second < 100 else 10):
                drains.left(("t", "x"))
            found = drains.wait(("t", "x"), 10, float(second))
        assert found == pytest.approx(1.0, rel=0.05)

    def test_of_too_many_the_oldest_is_forgotten(self) -> None:
        drains = Drains()
        for number in range(MAX_KNOWN + 5):
            drains.wait((f"{number}", ""), 0, 0.0)
        assert len(drains._drains) == MAX_KNOWN


class TestAnswers:
    def test_an_answer_is_expected_to_have_its_limit_before_any_stopped(self) -> None:
        answers = Answers()
        assert answers.expected("t", "x", 500) == 500
        for most in (16, 512) * 20:
            answers.ended("t", "x", 10, most, stopped=False)
        assert answers.expected("t", "x", 16) == 16
        assert answers.expected("t", "x", 512) == 512

    def test_limits_cut_answers_off_and_do_not_shorten_what_is_expected_of_others(self) -> None:
        """Answers of 200 tokens on average, half of them asked for with a limit of 50."""
        answers, chance = Answers(), random.Random(3)
        for number in range(4000):
            most, length = (50, 4096)[number % 2], 1 + int(chance.expovariate(1 / 200))
            answers.ended("t", "x", 10, min(most, length), stopped=length < most)
        assert answers.expected("t", "x", 4096) == pytest.approx(200, rel=0.5)
        assert 35 < answers.expected("t", "x", 50) < 50

    def test_a_version_has_its_own_and_a_new_one_that_of_its_tenant(self) -> None:
        answers = Answers()
        for _ in range(200):
            answers.ended("t", "short", 10, 20, stopped=True)
            answers.ended("u", "long", 10, 400, stopped=True)
        assert answers.expected("t", "short", 4096) == pytest.approx(20)
        assert answers.expected("t", "new", 4096) == pytest.approx(20)
        assert 20 < answers.expected("v", "new", 4096) < 400
        assert answers.mean("u") == (pytest.approx(400), pytest.approx(10))
        assert answers.mean("v") == answers.mean()

    def test_tenants_and_versions_are_bounded(self) -> None:
        answers = Answers()
        for number in range(MAX_KNOWN + 10):
            answers.ended(f"{number}", "x", 1, 1, stopped=True)
        assert len(answers._tenants) == len(answers._versions) == MAX_KNOWN
