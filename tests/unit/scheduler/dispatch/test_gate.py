"""Who is refused for an estimate, and how estimates are put right by what happens."""

import math
import random

import pytest

from scheduler.dispatch.estimates import calibration
from scheduler.dispatch.estimates.calibration import Calibration
from scheduler.dispatch.estimates.estimator import Estimate
from scheduler.dispatch.estimates.gate import RETRY_S, Expected, Gate
from scheduler.dispatch.groups import Waiting
from scheduler.errors import DeadlineUnreachable, QueueTooLong
from tests.support.services.planning import request


class Told:
    """In place of an estimator: says what it is told to."""

    def __init__(self) -> None:
        self.next: Estimate | None = None
        self.asked_at = 0.0

    def estimate(self, request: Waiting, most: int, now: float) -> Estimate | None:
        self.asked_at = now
        return self.next


class World:
    """A gate whose requests take `truth` times what is told."""

    def __init__(self, max_queue_s: float = math.inf) -> None:
        self.told = Told()
        self.answers: list[int] = []
        self.gate = Gate(self.told, self, max_queue_s, chance=lambda: 0.0)  # type: ignore[arg-type]
        self.now = 0.0

    def ended(self, tenant: str, digest: str, prompt: int, tokens: int, *, stopped: bool) -> None:
        self.answers.append(tokens)

    def ask(self, first: float, end: float, deadline: float | None) -> Expected | None:
        self.told.next = Estimate(first, first, end)
        return self.gate.expect(request(1), 100, deadline, self.now)

    def serve(self, first: float, end: float, truth: float = 1.0, deadline: float = math.inf) -> bool:
        """Whether it was let in and made its deadline. Ends come in order."""
        self.now += 10.0
        try:
            expected = self.ask(first, end, deadline)
        except DeadlineUnreachable:
            return False
        assert expected
        made = end * truth <= deadline
        if first * truth <= deadline:
            self.gate.began(expected, self.now + first * truth)
        self.gate.ended(expected, self.now + min(deadline, end * truth), late=not made)
        return made

    def learn(self, truth: float = 1.0, count: int = 1000) -> None:
        for _ in range(count):
            self.serve(5.0, 8.0, truth)


def test_nobody_is_refused_before_anything_was_seen() -> None:
    world = World(max_queue_s=1.0)
    assert world.ask(1000.0, 2000.0, 0.1)
    assert world.ask(1000.0, 2000.0, None)


def test_nobody_is_refused_of_whom_nothing_can_be_said() -> None:
    world = World(max_queue_s=1.0)
    world.learn()
    world.told.next = None
    assert world.gate.expect(request(1), 100, 0.001, 0.0) is None


def test_a_deadline_that_cannot_be_made_is_refused_with_what_it_would_take() -> None:
    world = World()
    world.learn()
    with pytest.raises(DeadlineUnreachable) as caught:
        world.ask(20.0, 30.0, 10.0)
    error = caught.value
    assert error.reason == "DEADLINE_UNREACHABLE" and error.code.name == "DEADLINE_EXCEEDED"
    assert float(error.metadata["estimate_s"]) == pytest.approx(30, rel=0.1)
    assert error.metadata["deadline_s"] == "10.000"
    assert error.retry_after_s == pytest.approx(20, rel=0.2)
    assert world.ask(5.0, 8.0, 10.0)


def test_a_first_token_after_the_deadline_is_enough_to_refuse() -> None:
    world = World()
    world.learn()
    with pytest.raises(DeadlineUnreachable):
        world.ask(20.0, 20.0, 15.0)


def test_those_without_a_deadline_are_refused_for_their_wait_alone() -> None:
    world = World(max_queue_s=10.0)
    world.learn()
    assert world.ask(9.0, 1000.0, None)
    with pytest.raises(QueueTooLong) as caught:
        world.ask(13.0, 14.0, None)
    error = caught.value
    assert (error.reason, error.code.name) == ("QUEUE_TOO_LONG", "RESOURCE_EXHAUSTED")
    assert error.metadata["limit_s"] == "10"
    assert error.retry_after_s is not None and 2.0 <= error.retry_after_s < 5.0
    assert world.ask(30.0, 31.0, 100.0), "a deadline says better how long it may wait"


def test_when_to_come_again_is_bounded() -> None:
    world = World(max_queue_s=1.0)
    world.learn()
    for wait, again in ((1.5, RETRY_S[0]), (1e6, RETRY_S[1])):
        with pytest.raises(QueueTooLong) as caught:
            world.ask(wait, wait, None)
        assert caught.value.retry_after_s == again


@pytest.mark.parametrize("truth", [0.25, 1.0, 3.0])
def test_estimates_are_put_right_by_what_happens(truth: float) -> None:
    world = World()
    world.learn(truth)
    assert world.gate.end.factor == pytest.approx(truth, rel=0.2)
    with pytest.raises(DeadlineUnreachable):
        world.ask(10.0, 20.0, 20.0 * truth * 0.7)
    assert world.ask(10.0, 20.0, 20.0 * truth * 1.3)


def test_the_doubt_is_as_large_as_the_estimates_are_off() -> None:
    """Half of a deadline is refused where estimates hold, and not where a fifth takes a third of them."""
    sure, doubtful, chance = World(), World(), random.Random(1)
    for _ in range(1000):
        sure.serve(5.0, 8.0, chance.uniform(0.9, 1.1))
        doubtful.serve(5.0, 8.0, 1 / 3 if chance.random() < 0.2 else 1.0)
    with pytest.raises(DeadlineUnreachable):
        sure.ask(10.0, 20.0, 10.0)
    assert doubtful.ask(10.0, 20.0, 10.0)


def test_while_those_let_in_miss_the_gate_gets_stricter_and_then_lets_more_in_again() -> None:
    world, chance = World(), random.Random(2)
    for _ in range(300):
        world.serve(5.0, 8.0, chance.uniform(0.8, 1.2), deadline=8.0)
    strict = world.gate.strictness
    assert strict > 0.3
    with pytest.raises(DeadlineUnreachable):
        world.ask(10.0, 20.0, 20.0)
    for _ in range(1500):
        world.serve(5.0, 8.0, chance.uniform(0.8, 1.2), deadline=20.0)
    assert world.gate.strictness < 0.1
    assert world.ask(10.0, 20.0, 20.0)


def test_in_a_lasting_overload_at_most_a_few_of_those_let_in_miss() -> None:
    """Their waits are whatever the gate lets the queue grow to."""
    world, chance, outcomes = World(), random.Random(3), list[bool]()
    wait = 0.0
    for _ in range(3000):
        refused_before = len(outcomes)
        try:
            world.ask(wait, wait + 1.0, 5.0)
        except DeadlineUnreachable:
            wait -= 0.02
            continue
        outcomes.append(world.serve(wait, wait + 1.0, chance.uniform(0.8, 1.3), deadline=5.0))
        assert len(outcomes) > refused_before
        wait = max(0.0, wait + 0.02)
    assert sum(outcomes[500:]) / len(outcomes[500:]) > 0.8


def test_waits_that_are_short_beside_answers_say_little_of_long_ones() -> None:
    world = World()
    for _ in range(200):
        world.now += 1.0
        expected = world.ask(0.01, 3.0, 60.0)
        assert expected
        world.gate.began(expected, world.now + 0.15)
        world.gate.ended(expected, world.now + 3.1, late=False)
    assert world.gate.first_token.factor < 1.3
    assert world.ask(10.0, 13.0, 15.0)


def test_a_pause_of_the_process_is_no_time_in_which_nothing_left() -> None:
    world = World()
    world.gate.expect(request(1), 100, None, 1000.0, awake=945.0)
    assert world.told.asked_at == 945.0
    world.gate.expect(request(1), 100, None, 1001.0)
    assert world.told.asked_at == 1001.0


def test_an_answer_that_ended_teaches_how_long_answers_are() -> None:
    world = World()
    world.gate.answered(request(1), 33, stopped=True)
    assert world.answers == [33]


class TestCalibration:
    def test_outliers_weigh_no_more_than_others(self) -> None:
        learned = Calibration()
        for number in range(1000):
            learned.learn(10.0, 1e9 if number % 20 == 0 else 10.0, float(number))
        assert learned.factor == pytest.approx(1.0, rel=0.1)
        assert learned.margin(0) > 0.8

    @pytest.mark.parametrize("happened", [1e-9, 1e9])
    def test_it_is_bounded(self, happened: float) -> None:
        learned = Calibration()
        for number in range(2000):
            learned.learn(10.0, happened, float(number))
        assert 1 / 8.01 <= learned.margin(0) <= learned.margin(1) <= 8.01

    def test_what_it_learned_fades_without_samples(self) -> None:
        learned = Calibration()
        for number in range(200):
            learned.learn(10.0, 40.0, float(number))
        before = learned.factor
        learned.learn(10.0, 40.0, 1e6)
        assert before > 3 and learned.factor < 1.2

    def test_one_that_was_over_early_says_nothing_of_how_fast_it_might_have_been(self) -> None:
        learned = Calibration()
        for number in range(200):
            learned.learn(10.0, 10.0, float(number))
        before = learned.margin(0)
        for _ in range(50):
            learned.learn(10.0, 1.0, 200.0, at_least=True)
        assert learned.margin(0) == pytest.approx(before, rel=0.01)

    def test_it_says_nothing_of_few_samples(self) -> None:
        learned = Calibration()
        for number in range(calibration.ENOUGH):
            assert not learned.known
            learned.learn(1.0, 1.0, float(number))
        assert learned.known
