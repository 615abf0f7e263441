"""Counts of what callers hold at once of something that all share, and when who is refused is to come."""

import itertools
from collections.abc import Callable
from random import Random

import pytest

from lorafleet.doors.held import Held
from lorafleet.doors.places import BEYOND
from scheduler.simulate.clock import Clock


class TooMuch(Exception):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def test_a_caller_and_all_hold_so_much_and_what_is_given_back_is_there_for_others() -> None:
    held = Held("things", 4, TooMuch, lambda caller: 3)
    held.take("a", 3)
    with pytest.raises(TooMuch, match="too many things of a: at most 3 at once"):
        held.take("a", 1)
    held.take("b", 1)
    with pytest.raises(TooMuch, match="there are too many things now"):
        held.take("c", 1)
    held.give_back("a", 2)
    held.take("c", 2)
    assert (held["a"], held["b"], held["c"], held.total) == (1, 1, 2, 4)


def test_who_has_none_may_have_one_beside_a_flood_and_who_is_alone_one_of_any_size() -> None:
    held = Held("things", 4, TooMuch, lambda caller: 0, first=2.0)
    held.take("a", 100)
    with pytest.raises(TooMuch):
        held.take("a", 1)
    held.give_back("a", 100)
    held.take("a", 4)
    with pytest.raises(TooMuch):
        held.take("a", 1)
    held.take("b", 4)
    with pytest.raises(TooMuch):
        held.take("c", 1)


def test_who_comes_when_it_was_told_to_is_let_in_and_a_stranger_is_not() -> None:
    clock = Clock()
    held = Held("things", 2, TooMuch, lambda caller: 2, clock=lambda: clock.now)
    held.take("a", 2)
    told = {}
    for key in ("first", "second"):
        with pytest.raises(TooMuch) as caught:
            held.take("a", 1, key)
        told[key] = caught.value.retry_after_s
    assert 0 < told["first"] < told["second"]
    clock.now = told["first"]
    for key in ("stranger", "second"):
        with pytest.raises(TooMuch):
            held.take("a", 1, key)
    held.take("a", 1, "first")
    assert held.total == 3 <= BEYOND * 2
    clock.now = 1000.0
    with pytest.raises(TooMuch):
        held.take("a", 1, "second")  # Too late.


class Callers:
    """What comes at random, each for about a second, and who is refused comes again once, a little later
    than it was told."""

    def __init__(
        self, held: Callable[[Callable[[], float]], Held], seed: int, amount: tuple[int, int]
    ) -> None:
        self.clock, self.rng, self.amount = Clock(), Random(seed), amount
        self.held = held(lambda: self.clock.now)
        self.came_in: list[bool] = []
        self.most = 0
        self._keys = itertools.count()

    def arrive(self, caller: str, rate: float) -> None:
        self._come(caller, self.rng.randint(*self.amount), str(next(self._keys)), again=False)
        self.clock.at(self.clock.now + self.rng.expovariate(rate), self.arrive, caller, rate)

    def _come(self, caller: str, amount: int, key: str, again: bool) -> None:
        try:
            self.held.take(caller, amount, key)
        except TooMuch as error:
            if again:
                self.came_in.append(False)
            else:
                after_s = error.retry_after_s + self.rng.uniform(0, 0.1)
                self.clock.at(self.clock.now + after_s, self._come, caller, amount, key, True)
            return
        if again:
            self.came_in.append(True)
        self.most = max(self.most, self.held.total)
        ends = self.clock.now + self.rng.expovariate(1.0)
        self.clock.at(ends, self.held.give_back, caller, amount)


MIB = 1 << 20
SHARED = [1 / 6] * 6
HOG = [0.8, 0.1, 0.1]
KINDS = {
    # What there may be in all, and of one caller; how large one is; whose is how much of what is asked for.
    "under-check": (64, 0, (1, 1), 2.0, HOG),  # --max-admitting
    "long-texts": (32 * MIB, 0, (16_384, 4 * MIB), 2.0, HOG),
    "large-messages": (32 * MIB, 16 * MIB, (65_536, 8 * MIB), 1.0, [0.9, 0.1]),
    "messages-on-their-way": (8, 4, (1, 1), 1.0, SHARED),
    "open-calls": (1 << 30, 128, (1, 1), 1.0, [1.0]),
    "listings": (5, 4, (1, 1), 1.0, HOG),
    "watches": (64, 16, (1, 1), 1.0, SHARED),
    "templates": (1024, 256, (1, 1), 1.0, [1.0]),
}


@pytest.mark.parametrize("load", [1.5, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_one_retry_after_the_told_delay_is_let_in(kind: str, load: float) -> None:
    most, share, amount, first, tenants = KINDS[kind]

    def held(clock: Callable[[], float]) -> Held:
        return Held("things", most, TooMuch, lambda caller: share, first=first, clock=clock)

    callers = Callers(held, 1, amount)
    bound = min(most, share * len(tenants) or most)
    rate = load * bound / (sum(amount) / 2)
    for number, part in enumerate(tenants):
        callers.clock.at(0.0, callers.arrive, str(number), rate * part)
    callers.clock.run(min(60.0, 4000.0 / rate))  # Fewer than are kept.
    assert len(callers.came_in) > 50
    assert sum(callers.came_in) >= 0.95 * len(callers.came_in)
    assert callers.most <= first * BEYOND * bound


def test_what_gives_nothing_back_says_nothing_of_how_soon_there_is_room() -> None:
    """As a push that ends before its first byte."""
    clock, told = Clock(), list[float]()
    for nothings in (0, 100):
        held = Held("bytes", 1000, TooMuch, clock=lambda: clock.now)
        held.take("a", 1000)
        clock.now += 1.0
        for _ in range(nothings):
            held.give_back("b", 0)
        with pytest.raises(TooMuch) as caught:
            held.take("b", 500)
        told.append(caught.value.retry_after_s)
    assert told[0] == told[1]


def test_what_takes_nothing_is_let_in_when_there_is_less_than_is_held() -> None:
    """As an empty piece of a push whose tenant may have less since it began."""
    share = 1000
    held = Held("bytes", 5000, TooMuch, lambda caller: share)
    held.take("a", 1000)
    share = 500
    held.take("a", 0)
    with pytest.raises(TooMuch):
        held.take("a", 1)
