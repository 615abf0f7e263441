"""When those who find the queue full are told to come again, and whether there is room for them then."""

import itertools
from random import Random

import pytest

from scheduler.dispatch.estimates.full_queue import FullQueue
from scheduler.dispatch.groups import Waiting
from scheduler.dispatch.queue import Queue
from scheduler.simulate.clock import Clock


def waiting(number: int, tenant: str) -> Waiting:
    return Waiting(number, tenant, "", 0, 10, 0, frozenset())


class House:
    """A queue that requests leave at `rate` a second, at random moments, the first of all tenants first."""

    def __init__(self, rate: float, bound: int, seed: int) -> None:
        self.clock, self.rng, self.rate = Clock(), Random(seed), rate
        self.queue = Queue(bound, 1 << 20)
        self.full_queue = FullQueue(self.queue)
        self.told: list[
            tuple[float, bool]
        ] = []  # Of each retry: the delay that was told, and whether it came in.
        self.most = self._numbers = 0
        self._keys = itertools.count()
        self.clock.at(0.0, self._leave)

    def _leave(self) -> None:
        if len(self.queue):
            self.queue.take(min(each.number for each in self.queue.requests()))
            self.full_queue.left(self.clock.now)
        self.clock.at(self.clock.now + self.rng.expovariate(self.rate), self._leave)

    def come(self, tenant: str, retries: bool, delay_s: float | None = None, key: str = "") -> None:
        key = key or str(next(self._keys))
        full = self.full_queue.check(tenant, key, self.clock.now, enters=True)
        if delay_s is not None:
            self.told.append((delay_s, full is None))
        if full is None:
            self._numbers += 1
            assert self.queue.add(waiting(self._numbers, tenant), again=True) is None
            self.most = max(self.most, len(self.queue))
        elif retries:
            again = self.clock.now + full + self.rng.uniform(0, 0.1)
            self.clock.at(again, self.come, tenant, retries, full, key)

    def arrivals(self, tenant: str, rate: float, *, retries: bool) -> None:
        def arrive() -> None:
            self.come(tenant, retries)
            self.clock.at(self.clock.now + self.rng.expovariate(rate), arrive)

        self.clock.at(self.rng.expovariate(rate), arrive)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("times", [1.2, 5.0])
@pytest.mark.parametrize("bound", [8, 64])
def test_a_retry_after_the_told_delay_comes_in(bound: int, times: float, seed: int) -> None:
    house = House(10.0, bound, seed)
    house.arrivals("hog", 10.0 * times, retries=True)
    house.clock.run(120.0)
    settled = [came_in for _, came_in in house.told]
    assert len(settled) > 40
    assert sum(settled) >= 0.95 * len(settled)
    assert house.most <= 2 * bound


def test_others_that_never_wait_take_no_ones_place_but_their_own_tenants() -> None:
    house = House(10.0, 20, seed=1)
    house.arrivals("hog", 100.0, retries=False)
    house.arrivals("honest", 3.0, retries=True)
    house.clock.run(60.0)
    delays = [delay for delay, _ in house.told]
    assert len(delays) > 20
    assert sum(came_in for _, came_in in house.told) >= 0.95 * len(house.told)
    assert max(delays) < 10.0  # However long the line of the hog is.


@pytest.mark.parametrize("rate", [0.5, 2.0, 8.0])
def test_the_delay_follows_how_fast_requests_leave(rate: float) -> None:
    house = House(rate, 10, seed=2)
    house.arrivals("hog", 5 * rate, retries=False)
    house.clock.run(100.0)
    while house.full_queue.check("hog", "", house.clock.now) is None:
        house.come("hog", retries=False)
    full = house.full_queue.check("other", "", house.clock.now)
    assert full and 3.0 / rate < full < 30.0 / rate


def test_two_who_are_refused_at_once_are_not_told_the_same_moment() -> None:
    house = House(10.0, 1, seed=3)
    house.come("a", retries=False)
    told = [full for key in "xyz" if (full := house.full_queue.check("a", key, 0.0))]
    assert told == sorted(set(told)) and len(told) == 3 and told[0] > 0


def test_a_place_that_nobody_takes_is_gone_after_a_while() -> None:
    house = House(10.0, 1, seed=4)
    house.come("a", retries=False)
    full = house.full_queue.check("a", "x", 0.0)
    assert full
    assert house.full_queue.check("a", "y", full)
    assert house.full_queue.check("a", "x", full) is None
    assert house.full_queue.check("a", "x", full + 60.0)
