"""Several schedulers give one tenant's rates: how far over them a fleet can go, on virtual time."""

from heapq import heapify, heappop, heappush
from random import Random

import pytest

from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.quotas import Quotas
from scheduler.tenants.rates import Costs, Refusal
from scheduler.tenants.sharing import SILENCE_S, Sharing

RATE, BURST_S, EVERY_S = 20.0, 10.0, 0.5
LIMITS = TenantLimits(requests_per_minute=60 * RATE, burst_seconds=BURST_S)


class Fleet:
    """Schedulers that tell each other what they are asked for, each in its own rhythm."""

    def __init__(self, count: int, rng: Random) -> None:
        self.parts = [Sharing() for _ in range(count)]
        self.quotas = [Quotas(lambda tenant: LIMITS, part.share) for part in self.parts]
        self.told: dict[int, str] = {}
        self._next = [rng.uniform(0, EVERY_S) for _ in range(count)]
        for index, part in enumerate(self.parts):
            self.told[index] = part.tell(0.0)
        for part in self.parts:
            part.hear(self.told.values(), 0.0)

    def exchange(self, now: float, away: bool = False) -> None:
        for index, part in enumerate(self.parts):
            while self._next[index] <= now:
                if not away:
                    self.told[index] = part.tell(self._next[index])
                    part.hear(self.told.values(), self._next[index])
                self._next[index] += EVERY_S

    def ask(self, index: int, now: float) -> bool:
        return self.refused(index, now) is None

    def refused(self, index: int, now: float, key: str = "") -> Refusal | None:
        return self.quotas[index].take("acme", Costs(), now, key)


def above_rate(taken: list[float]) -> float:
    """The most that any window of time had above its rate."""
    excess = worst = last = 0.0
    for at in taken:
        excess, last = max(0.0, excess - RATE * (at - last)) + 1, at
        worst = max(worst, excess)
    return worst


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("away", [False, True])
def test_a_fleet_stays_within_the_bound_whoever_is_asked(count: int, away: bool) -> None:
    """Ten times the quota, at schedulers that change all the time; with a Redis that comes and goes, too."""
    rng = Random(f"{count} {away}")
    fleet, now, taken, favourite, asked = Fleet(count, rng), 0.0, list[float](), 0, 0
    while now < 60:
        now += rng.expovariate(RATE * 10)
        fleet.exchange(now, away and 15 < now < 35)
        if rng.random() < 0.002:
            favourite = rng.randrange(count)
        if rng.random() < 0.001:  # Quiet, so that all save up.
            now += rng.uniform(0, 20)
        asked += 1
        if fleet.ask(favourite if rng.random() < 0.8 else rng.randrange(count), now):
            taken.append(now)
    bound = RATE * BURST_S + (count - 1) * RATE * 1.0 + count
    assert above_rate(taken) <= bound
    assert asked > 1000


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_comes_when_it_was_told_to_gets_in_while_parts_move(count: int) -> None:
    """Ten times the quota for a minute, each request at any of them, and there when it comes again."""
    rng, now, came, kept, taken = Random(count), 0.0, 0, 0, 0
    fleet, line = Fleet(count, rng), list[tuple[float, str, int, bool]]()
    while now < 60:
        now += rng.expovariate(RATE * 10)
        line.append((now, f"r{len(line)}", rng.randrange(count), False))
    heapify(line)
    while line and line[0][0] < 60:
        now, key, index, again = heappop(line)
        fleet.exchange(now)
        refusal = fleet.refused(index, now, key)
        came, kept, taken = came + again, kept + (again and not refusal), taken + (refusal is None)
        if refusal:
            heappush(line, (now + refusal.wait_s + rng.uniform(0, 0.1), key, index, True))
    assert came > 500 and kept >= 0.95 * came
    assert taken >= 0.9 * RATE * (60 + BURST_S)  # What is not promised is not lost.


@pytest.mark.parametrize("count", [2, 4])
def test_one_scheduler_that_is_asked_alone_gives_nearly_all(count: int) -> None:
    fleet, now, taken = Fleet(count, Random(1)), 0.0, 0
    while now < 60:
        now += 0.01
        fleet.exchange(now)
        taken += fleet.ask(0, now)
    assert taken >= 0.9 * RATE * 60


def test_without_news_each_gives_an_even_part_and_all_of_it_when_alone() -> None:
    parts = [Sharing() for _ in range(4)]
    for index, part in enumerate(parts):
        part.share("acme", 0.0, 10.0 if index == 0 else 0.0)
    texts = [part.tell(0.0) for part in parts]
    for part in parts:
        part.hear(texts, 0.0)
    assert parts[0].share("acme", 1.0) == pytest.approx(0.925)
    assert sum(part.share("acme", 1.0) for part in parts) == pytest.approx(1.0)
    assert sum(part.share("other", 1.0) for part in parts) == pytest.approx(1.0)
    assert parts[0].share("acme", SILENCE_S + 1.0) == 0.25
    alone = Sharing()
    assert alone.share("acme", 0.0, 1.0) == 1.0
    alone.count(2, 0.0)
    assert alone.share("acme", 0.0, 1.0) == 0.5
    alone.hear([alone.tell(0.0), "no such form"], 0.0)
    assert alone.share("acme", 0.0) == pytest.approx(0.95)
