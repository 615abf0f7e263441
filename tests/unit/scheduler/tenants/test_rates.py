"""Rates on virtual time: what is let in is bounded, and what is told is true."""

from dataclasses import replace
from heapq import heapify, heappop, heappush
from random import Random

import pytest

from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.quotas import MOST_KEPT, Quotas
from scheduler.tenants.rates import Costs, Rates

LIMITS = TenantLimits(
    requests_per_minute=600, prompt_tokens_per_minute=60_000, output_tokens_per_minute=30_000, burst_seconds=5
)
PER_S = (10.0, 1000.0, 500.0)


def random_costs(rng: Random) -> Costs:
    return Costs(1.0, rng.randint(1, 400), rng.randint(1, 200))


def test_a_bucket_begins_full_and_fills_at_its_rate() -> None:
    rates = Rates()
    rates.adjust(100.0, TenantLimits(requests_per_minute=60, burst_seconds=3))
    assert [rates.take(Costs(), 100.0) is None for _ in range(4)] == [True, True, True, False]
    refusal = rates.take(Costs(), 100.0)
    assert refusal is not None and refusal.reason == "REQUEST_RATE"
    assert refusal.wait_s == pytest.approx(1.0, abs=0.01)
    rates.adjust(101.1, TenantLimits(requests_per_minute=60, burst_seconds=3))
    assert rates.take(Costs(), 101.1) is None and rates.take(Costs(), 101.1) is not None


@pytest.mark.parametrize("seed", range(5))
def test_no_window_of_time_has_more_than_its_rate_and_one_burst(seed: int) -> None:
    rng, rates, now = Random(seed), Rates(), 0.0
    taken: list[tuple[float, Costs]] = []
    for number in range(1500):
        now += rng.choice((0.0, 0.01, 0.05, rng.expovariate(2.0)))
        rates.adjust(now, LIMITS)
        costs = random_costs(rng)
        if rates.take(costs, now, f"r{rng.randint(0, number)}" if rng.random() < 0.5 else "") is None:
            taken.append((now, costs))
    assert len(taken) > 100
    for kind, rate in enumerate(PER_S):
        excess = worst = 0.0  # The most that any window had above its rate, as a maximal subarray.
        last = 0.0
        for at, costs in taken:
            excess = max(0.0, excess - rate * (at - last)) + costs[kind]
            worst, last = max(worst, excess), at
        assert worst <= rate * (5 + 1) + 1e-3


def test_what_costs_more_than_a_burst_waits_for_a_full_bucket_and_is_paid_off() -> None:
    limits = TenantLimits(prompt_tokens_per_minute=600, burst_seconds=1)
    rates = Rates()
    rates.adjust(0.0, limits)
    assert rates.take(Costs(prompt_tokens=100), 0.0) is None
    refusal = rates.take(Costs(prompt_tokens=5), 0.0, "next")
    assert refusal is not None and refusal.wait_s == pytest.approx(9.5, abs=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_a_clock_that_jumps_grants_nothing_and_stalls_nobody(seed: int) -> None:
    rng, rates, now, ahead, taken = Random(seed), Rates(), 1000.0, 0.0, 0
    limits = TenantLimits(requests_per_minute=60, burst_seconds=4)
    for _ in range(500):
        step = rng.choice((0.05, -rng.uniform(0, 1e6), rng.uniform(0, 0.5)))
        now, ahead = now + step, ahead + max(0.0, step)
        rates.adjust(now, limits)
        taken += rates.take(Costs(), now) is None
    assert 0.5 * ahead <= taken <= ahead + 4
    now += 1e9  # And far ahead: full, not more.
    rates.adjust(now, limits)
    assert sum(rates.take(Costs(), now) is None for _ in range(20)) == 4


def test_other_limits_count_at_once_and_charge_nothing_again() -> None:
    rates, before = Rates(), TenantLimits(requests_per_minute=60, burst_seconds=10)
    rates.adjust(0.0, before)
    for _ in range(10):
        assert rates.take(Costs(), 0.0) is None
    rates.adjust(0.0, TenantLimits(requests_per_minute=600, burst_seconds=10))
    assert rates.take(Costs(), 0.0) is not None  # More may be saved up, nothing is given.
    rates.adjust(1.0, TenantLimits(requests_per_minute=600, burst_seconds=10))
    # Filled by the rate of before until it was read again, then by the new one.
    assert sum(rates.take(Costs(), 1.0) is None for _ in range(20)) == 10
    rates.adjust(1000.0, TenantLimits(requests_per_minute=12, burst_seconds=10))
    assert sum(rates.take(Costs(), 1000.0) is None for _ in range(20)) == 2
    rates.adjust(1000.0, TenantLimits())
    assert all(rates.take(Costs(), 1000.0) is None for _ in range(100))


def test_what_an_answer_does_not_use_is_given_back() -> None:
    limits = TenantLimits(output_tokens_per_minute=6000, burst_seconds=10)
    rates = Rates()
    rates.adjust(0.0, limits)
    assert rates.take(Costs(output_tokens=900), 0.0) is None
    assert rates.take(Costs(output_tokens=900), 0.0) is not None
    rates.give_back(850)
    rates.adjust(0.0, limits)
    assert rates.take(Costs(output_tokens=900), 0.0) is None


def retries(
    limits: TenantLimits, rng: Random, load: float, *, comes_back: float, used: float, seconds: int = 30
) -> tuple[int, int, float]:
    """A tenant that asks for `load` times its quota; of the refused `comes_back` come once more, after the
    told delay and some chance. An answer uses a part of what it reserved. How many came, how many of them got
    in, and what all that got in cost, in quotas of the time."""
    rates, now, came, succeeded, spent = Rates(), 0.0, 0, 0, [0.0, 0.0, 0.0]
    events: list[tuple[float, str, Costs | None, float]] = []
    at, number = 0.0, 0
    while at < seconds:
        at += rng.expovariate(load * 5)  # About as many as the quota takes of `random_costs`.
        number += 1
        events.append((at, f"r{number}", random_costs(rng), 0.0))
    heapify(events)
    retried = set[str]()
    while events:
        now, key, costs, back = heappop(events)
        rates.adjust(now, limits)
        if costs is None:
            rates.give_back(back)
            continue
        refusal = rates.take(costs, now, key)
        if key in retried:
            came, succeeded = came + 1, succeeded + (refusal is None)
        if refusal is None:
            spent = [before + cost * (now < seconds) for before, cost in zip(spent, costs, strict=True)]
            heappush(events, (now + rng.uniform(0.5, 5), key, None, costs.output_tokens * (1 - used)))
        elif key not in retried and rng.random() < comes_back:
            retried.add(key)
            heappush(events, (now + refusal.wait_s + rng.uniform(0, 0.2), key, costs, 0.0))
    quotas = (had / rate / seconds for had, rate in zip(spent, PER_S, strict=True))
    return came, succeeded, max(quotas)


@pytest.mark.parametrize("load", [1.5, 3.0, 10.0])
@pytest.mark.parametrize(
    ("burst_seconds", "comes_back", "used"), [(5, 1.0, 1.0), (5, 1.0, 0.3), (5, 0.5, 0.5), (0.5, 1.0, 1.0)]
)
def test_one_retry_after_the_told_delay_succeeds(
    load: float, burst_seconds: float, comes_back: float, used: float
) -> None:
    limits, rng = replace(LIMITS, burst_seconds=burst_seconds), Random(f"{load} {comes_back} {used}")
    came, succeeded, _ = retries(limits, rng, load, comes_back=comes_back, used=used)
    assert came >= 20 and succeeded >= 0.95 * came


@pytest.mark.parametrize("load", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("comes_back", [0.0, 0.25, 0.5])
def test_who_does_not_come_again_leaves_the_rate_to_others(load: float, comes_back: float) -> None:
    rng = Random(f"{load} {comes_back}")
    came, succeeded, quotas = retries(LIMITS, rng, load, comes_back=comes_back, used=1.0, seconds=60)
    assert succeeded >= 0.95 * came
    assert quotas >= 0.8


def test_who_comes_too_early_over_and_over_takes_no_more_memory() -> None:
    rates, limits = Rates(), TenantLimits(requests_per_minute=60, burst_seconds=1)
    rates.adjust(0.0, limits)
    assert rates.take(Costs(), 0.0) is None
    told = [rates.take(Costs(), 0.0, f"r{number}") for number in range(100)]
    for number in range(5000):
        now = number / 10_000
        rates.adjust(now, limits)
        refusal, first = rates.take(Costs(), now, f"r{number % 100}"), told[number % 100]
        assert refusal and first and now + refusal.wait_s == pytest.approx(first.wait_s, abs=0.01)
    promises = rates._promises
    assert max(len(promises._ends), len(promises._dues)) <= 100
    rates.adjust(1.01, limits)
    assert rates.take(Costs(), 1.01, "r0") is None


def test_tenants_whose_buckets_are_full_again_are_forgotten() -> None:
    quotas = Quotas(lambda tenant: TenantLimits(requests_per_minute=60, burst_seconds=1))
    for number in range(3 * MOST_KEPT):
        tenant, now = f"t{number}", float(number)
        assert quotas.take(tenant, Costs(), now) is None and quotas.take(tenant, Costs(), now, "again")
    assert len(quotas._rates) <= MOST_KEPT


def test_who_is_looked_at_and_let_in_has_come_once() -> None:
    """As requests are: before their prompt is tokenized, and after."""
    limits, learned = TenantLimits(requests_per_minute=60, burst_seconds=1), list[float]()
    for looks in (0, 3):
        rates = Rates()
        rates.adjust(0.0, limits)
        assert rates.take(Costs(), 0.0) is None and rates.take(Costs(), 0.0, "lost")
        rates.adjust(100.0, limits)  # It has not come.
        assert rates.take(Costs(), 100.0) is None
        refusal = rates.take(Costs(), 100.0, "mine")
        assert refusal is not None
        due = 100.0 + refusal.wait_s
        rates.adjust(due, limits)
        assert all(rates.check(Costs(), due, "mine") is None for _ in range(looks))
        assert rates.take(Costs(), due, "mine") is None
        learned.append(rates._returning)
    assert learned[0] == learned[1] < 1.0


def test_limits_that_are_read_again_as_they_were_keep_what_was_told() -> None:
    limits, rates = TenantLimits(requests_per_minute=60, burst_seconds=2), Rates()
    rates.adjust(0.0, limits)
    assert rates.take(Costs(2), 0.0) is None
    refusal = rates.take(Costs(2), 0.0, "mine")
    assert refusal is not None
    rates.adjust(1.0, replace(limits))
    assert rates.take(Costs(), 1.0, "other") is not None
    rates.adjust(refusal.wait_s, replace(limits))
    assert rates.take(Costs(2), refusal.wait_s, "mine") is None
