import math
from collections import deque

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from scheduler.fleet.demand import Demand, DemandMeter
from scheduler.fleet.demand_series import DemandCollector
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report

LIMITS = Limits(1024, 16, frozenset({"q_proj"}), max_loras=4, max_seats=10)


def executor(number: int, free_seats: int = 10, free_slots: int = 4) -> ExecutorState:
    state = ExecutorState(f"host:{number}", phase=Phase.READY)
    state.limits = LIMITS
    state.reported(Report(free_seats=free_seats, free_slots=free_slots))
    return state


def seen(states: list[ExecutorState], waiting: int = 0, cold: int = 0, seat_s: float = 15.0) -> Demand:
    meter = DemandMeter(filled=0.5, start_within_s=30.0)
    meter.seat_s = seat_s
    meter.look(0.0, states, waiting, cold)
    return meter.last


def test_what_runs_fills_a_share_of_the_seats() -> None:
    demand = seen([executor(1, free_seats=5), executor(2, free_seats=10)])
    assert (demand.executors, demand.seats, demand.seats_in_use) == (2, 20, 5)
    assert (demand.running, demand.waiting, demand.queued_s) == (1.0, 0.0, 0.0)


def test_slots_in_use_hold_executors_back_from_leaving() -> None:
    demand = seen([executor(1, 9, free_slots=0), executor(2, 9, free_slots=2)])
    assert (demand.slots, demand.slots_in_use) == (8, 6)
    assert demand.running == 1.5


@pytest.mark.parametrize(("seat_s", "at_once"), [(15.0, 0.5), (30.0, 1.0), (300.0, 1.0)])
def test_what_waits_needs_the_seats_that_let_it_start_in_time(seat_s: float, at_once: float) -> None:
    """A seat serves several of them within that time, if they are short."""
    assert seen([executor(1)], waiting=20, seat_s=seat_s).waiting == 20 / (10 * 0.5) * at_once


def test_versions_without_a_slot_need_slots() -> None:
    assert seen([executor(1)], waiting=8, cold=8, seat_s=30.0).waiting == 2.0
    assert seen([executor(1)], waiting=20, cold=8, seat_s=30.0).waiting == 4.0


def test_executors_that_serve_nobody_are_not_counted() -> None:
    draining, cordoned, away = executor(1, 0), executor(2, 0), ExecutorState("host:3")
    draining.phase, cordoned.cordoned = Phase.DRAINING, True
    assert seen([draining, cordoned, away], waiting=3) == Demand(queued_s=45.0)
    assert seen([draining, executor(4)]).seats == 10


def test_a_cordoned_executor_keeps_its_place_in_the_number() -> None:
    """The one with the highest number leaves, not the one that is cordoned: 1 would take away who serves."""
    cordoned = executor(1)
    cordoned.cordoned = True
    assert seen([cordoned, executor(2, free_seats=6)]).running == 1.0 + 0.8
    cordoned.phase = Phase.DRAINING
    assert seen([cordoned, executor(2, free_seats=6)]).running == 0.8


def test_a_model_without_slots_is_scaled_by_seats() -> None:
    state = executor(1, free_seats=5, free_slots=0)
    state.limits = Limits(1024, 0, frozenset(), max_loras=0, max_seats=10)
    assert seen([state]).running == 1.0


def test_the_time_in_a_seat_is_measured_from_what_runs_and_what_was_sent() -> None:
    """One request a second, each for 8 s; the executor's stream breaks once, which loses what ran."""
    meter, state = DemandMeter(0.5, 30.0), executor(1)
    ends: deque[tuple[int, str]] = deque()
    for second in range(600):
        if second == 300:
            state.reset()
            ends.clear()
        while ends and ends[0][0] <= second:
            state.ended(ends.popleft()[1])
        state.sent(f"{second}", "x")
        ends.append((second + 8, f"{second}"))
        meter.look(float(second), [state], waiting=4, cold=0)
    assert meter.seat_s == pytest.approx(8, rel=0.1)
    assert meter.last.queued_s == 4 * meter.seat_s / 8


def test_the_number_that_it_asks_for_carries_the_load_and_stays() -> None:
    """A closed loop: an autoscaler that follows every 15 s, executors that come 60 s later; 12 requests a
    second for 20 s each are 240 seats, 24 full executors of 10, and 30 at 0.8."""
    meter = DemandMeter(0.8, 30.0)
    fleet, coming, waiting, asked = [executor(n) for n in range(4)], deque[int](), 0, []
    ends: deque[tuple[int, ExecutorState, str]] = deque()
    for second in range(1500):
        while coming and coming[0] <= second:
            coming.popleft()
            fleet.append(executor(len(fleet)))
        while ends and ends[0][0] <= second:
            _, state, name = ends.popleft()
            state.ended(name)
        waiting += 12
        for state in fleet:
            while waiting and state.num_running < LIMITS.max_seats:
                name = f"{second}-{waiting}"
                state.sent(name, "x")
                ends.append((second + 20, state, name))
                waiting -= 1
            running = state.num_running
            state.reported(Report(LIMITS.max_seats - running, 3, running=running, received=state.num_sent))
        meter.look(float(second), fleet, waiting, cold=0)
        if second % 15 == 14:
            wanted = math.ceil(meter.last.running + meter.last.waiting - 1e-9)
            coming.extend([second + 60] * (wanted - len(fleet) - len(coming)))
            asked.append(wanted)
    assert asked[-40:] == [30] * 40 and waiting == 0


def test_who_sees_no_executor_asks_for_no_number() -> None:
    """Of several schedulers another one may, and an autoscaler that reads nothing changes nothing."""
    registry = CollectorRegistry()
    demand = Demand()
    registry.register(DemandCollector(lambda: demand))
    assert "wanted_executors{" not in generate_latest(registry).decode()
    demand = seen([executor(1, free_seats=5)], waiting=20, seat_s=30.0)
    page = generate_latest(registry).decode()
    assert 'lorafleet_scheduler_wanted_executors{part="running"} 1.0' in page
    assert 'lorafleet_scheduler_wanted_executors{part="waiting"} 4.0' in page
    assert "lorafleet_scheduler_seats_in_use 5.0" in page
