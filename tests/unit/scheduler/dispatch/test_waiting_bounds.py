"""How long requests wait, on virtual time: cold versions, low priorities, light tenants beside floods.

Two executors of 16 slots and 64 seats, answers of about 128 tokens at 10 ms each, and aging of 2 s, unless a
test says otherwise. Beside each other run the production queue, policy, fleet state and hub.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.dispatch.cold import LASTS_S
from tests.support.services.virtual_executor import DELAY_S, LOAD_S, REPORT_S, STEP_S, VirtualExecutor
from tests.support.services.virtual_scheduler import SWEEP_S, Asked, VirtualScheduler
from tests.support.services.virtual_time import World

AGING_S = 2.0
LONG_AGING_S = 6.0  # Where it is to show whether a wait begins anew.
LATE = "10.0.1.0:1"
WARM_S = 4.0  # Until hot versions hold all slots, and their answers end at all times.
HOT = [f"hot{n}" for n in range(16)]
FIRST_TOKEN_S = 2 * DELAY_S + 2 * STEP_S


def fleet(
    schedulers: int = 1,
    *,
    executors: int = 2,
    seats: int = 64,
    slots: int = 16,
    reserve_seats: int = 0,
    late_length: int | None = None,
    aging_s: float = AGING_S,
) -> tuple[World, list[VirtualScheduler]]:
    """`late_length`: one more that takes such lengths, when it is connected."""
    world = World()
    there = [VirtualExecutor(world, f"10.0.0.{n}:1", seats, slots) for n in range(executors)]
    if late_length:
        there.append(VirtualExecutor(world, LATE, 1, 1, max_model_len=late_length))
    made = [
        VirtualScheduler(world, there, aging_s=aging_s, reserve_seats=reserve_seats, salt=7 * n, late=[LATE])
        for n in range(schedulers)
    ]
    return world, made


def keep_asking(
    world: World, scheduler: VirtualScheduler, asked: Callable[[], Asked], at_once: int, rng: Random
) -> None:
    """So many at once for ever, the first of them at some time of the first answer."""
    live: set[int] = set()

    def refill() -> None:
        live.difference_update([number for number in live if number in world.ended])
        while len(live) < at_once:
            live.add(scheduler.ask(asked()))

    world.every(2 * STEP_S, refill, first=world.now + rng.random() * 1.5)


def heat(world: World, schedulers: Sequence[VirtualScheduler], digests: Sequence[str] = HOT) -> None:
    """More requests for the hot versions than there are seats, for ever."""
    rng = Random(3)
    for number, digest in enumerate(digests):
        scheduler = schedulers[number % len(schedulers)]
        keep_asking(world, scheduler, lambda d=digest: Asked(d, tokens=rng.randint(96, 160)), 10, rng)  # type: ignore[misc]
    world.run(WARM_S)


def wait_for(world: World, numbers: Sequence[int], seconds: float) -> None:
    """Until all have started."""
    by = world.now + seconds
    while not all(number in world.started for number in numbers):
        assert world.now < by, "some have not started"
        world.run(min(by, world.now + 0.5))


def p99(waits: Sequence[float]) -> float:
    return sorted(waits)[math.ceil(0.99 * len(waits)) - 1]


def cold_behind_hot(schedulers: int, hot_on: slice, *, tenants: bool = False, tenant: str = "acme") -> float:
    """The p99 wait of 64 cold versions that are asked for in one moment."""
    world, made = fleet(schedulers)
    heat(world, made[hot_on])
    cold = [
        made[n % schedulers if hot_on == slice(None) else 0].ask(
            Asked(f"cold{n}", f"tenant{n}" if tenants else tenant)
        )
        for n in range(64)
    ]
    wait_for(world, cold, 12.0)
    for scheduler in made:
        scheduler.check()
    assert world.refused <= 0.03 * world.dispatches
    return p99(world.waits(cold))


def test_many_cold_versions_of_one_tenant_start_behind_hot_ones() -> None:
    alone = cold_behind_hot(1, slice(None))
    assert alone <= 10.0
    # The hot ones on the other scheduler, whose claims are not seen here; and both mixed on both.
    assert cold_behind_hot(2, slice(1, 2)) <= 1.5 * alone
    assert cold_behind_hot(2, slice(None)) <= 1.5 * alone


def test_cold_versions_of_tenants_of_their_own_wait_no_longer() -> None:
    assert cold_behind_hot(1, slice(None), tenants=True) <= 10.0


def test_slots_are_not_kept_for_a_scheduler_that_stands_still() -> None:
    """Its streams stay open, so only what it does not say tells the others."""
    world, [stopped, other] = fleet(2, executors=1, slots=4)
    heat(world, [other], HOT[:4])
    cold = [stopped.ask(Asked(f"cold{n}")) for n in range(2)]
    world.run(world.now + AGING_S + SWEEP_S + 2 * DELAY_S)
    [state] = other.states.values()
    assert {digest for digest, _ in state.report.cold} == {"cold0", "cold1"}
    stopped.stands_still = True
    world.run(world.now + LASTS_S + 2 * REPORT_S)
    assert not state.report.cold and not any(number in world.started for number in cold)
    late = [other.ask(Asked(digest)) for digest in HOT[:4]]
    wait_for(world, late, 4.0)
    stopped.stands_still = False  # It says it all again.
    wait_for(world, cold, 6.0)


@pytest.mark.parametrize("schedulers", [1, 2])
def test_one_new_cold_version_a_second_makes_no_backlog(schedulers: int) -> None:
    world, made = fleet(schedulers)
    heat(world, made[-1:])
    cold = []
    for number in range(16):
        cold.append(made[0].ask(Asked(f"cold{number}")))
        world.run(world.now + 1.0)
    late = [number for number in cold if world.now - world.asked_at[number] > 5.0]
    assert len(late) > 10 and all(number in world.started for number in late)
    assert max(world.waits(late)) <= 5.0


def test_the_lowest_priority_starts_within_its_bound() -> None:
    """Ten times the interval of aging, and then it is the oldest of all."""
    world, [scheduler] = fleet(executors=1, seats=8)
    keep_asking(world, scheduler, lambda: Asked(tokens=64), 24, Random(1))
    world.run(2.0)
    low = scheduler.ask(Asked(priority=-10))
    world.run(world.now + 40.0)
    assert low not in world.started
    world.run(world.now + 10.0 + SWEEP_S + 0.64 + FIRST_TOKEN_S)
    assert low in world.started


def light_waits(light: Asked, *, flood: Asked | None, reserve_seats: int = 0) -> list[float]:
    """Of requests that come one by one, beside more of the flood than there are seats."""
    world, [scheduler] = fleet(reserve_seats=reserve_seats)
    if flood:
        rng = Random(2)
        for _ in range(16):
            keep_asking(world, scheduler, lambda: replace(flood, tokens=rng.randint(96, 160)), 12, rng)
    world.run(2.0)
    lights = []
    for _ in range(20):
        world.run(world.now + 0.337)
        lights.append(scheduler.ask(light))
    wait_for(world, lights, 2.0)
    return world.waits(lights)


def test_a_flood_of_another_tenant_does_not_hold_up_a_light_one() -> None:
    light = Asked(tenant="light", tokens=16)
    alone = p99(light_waits(light, flood=None, reserve_seats=1))
    assert p99(light_waits(light, flood=Asked(tenant="flood"), reserve_seats=1)) <= 1.5 * alone


def test_a_flood_on_one_adapter_does_not_hold_up_another_of_the_tenant() -> None:
    """It has the next seat that frees: no seat is kept for it."""
    waits = light_waits(Asked("light", tokens=16), flood=Asked("flood"))
    assert p99(waits) <= 0.25


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    slots=st.integers(2, 8),
    executors=st.integers(1, 2),
    schedulers=st.integers(1, 2),
    cold=st.integers(1, 12),
    tokens=st.integers(10, 80),
    seats=st.sampled_from([1, 6]),
    late_length=st.sampled_from([None, 16, 2048]),
    rejects=st.integers(0, 2),
)
def test_the_bound_on_waiting_of_a_cold_version(
    slots: int,
    executors: int,
    schedulers: int,
    cold: int,
    tokens: int,
    seats: int,
    late_length: int | None,
    rejects: int,
) -> None:
    """At place k of a line: aging, then for each H before it the longest answer, a load, and what is told;
    and once more for each attempt that came to nothing.

    Also where all seats are taken, and where an executor comes meanwhile that takes other lengths, for which
    all that wait are grouped anew."""
    world, made = fleet(
        schedulers,
        executors=executors,
        slots=slots,
        seats=seats * slots,
        late_length=late_length,
        aging_s=LONG_AGING_S,
    )
    rng = Random(slots * 100 + cold)
    for number in range(slots):
        asked = Asked(f"hot{number}", tokens=tokens)

        def some(asked: Asked = asked) -> Asked:
            return replace(asked, tokens=rng.randint(tokens // 2, tokens))

        keep_asking(world, made[number % schedulers], some, 2 * seats * executors + 1, rng)
    world.run(WARM_S)
    numbers = [made[n % schedulers].ask(Asked(f"cold{n}", tokens=tokens)) for n in range(cold)]
    for scheduler in made:
        for executor in scheduler.executors.values():
            executor.rejects.update({f"cold{n}": rejects for n in range(cold)})
    world.run(world.now + LONG_AGING_S / 2)
    for scheduler in made if late_length else ():
        scheduler.connect(LATE)
    rounds = math.ceil(math.ceil(cold / executors) / max(1, slots // 2)) + rejects * executors
    each = tokens * STEP_S + LOAD_S + REPORT_S + SWEEP_S
    wait_for(world, numbers, LONG_AGING_S / 2 + SWEEP_S + rounds * each)
