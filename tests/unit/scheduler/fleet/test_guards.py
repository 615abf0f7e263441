"""Slow start and circuit breakers on a clock of the test's own."""

from scheduler.fleet.breaker import PAUSE_S, WINDOW_S, Breaker
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.slow_start import SlowStart
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report
from tests.support.services.planning import MODULES, executor


def started(name: str, instance: str = "1", seats: int = 10) -> ExecutorState:
    state = executor(name, seats=seats)
    state.instance_id = instance
    return state


def limits(states: list[ExecutorState]) -> list[int | None]:
    return [state.seat_limit for state in states]


def test_who_joins_others_at_work_gets_its_seats_bit_by_bit() -> None:
    slow_start, states = SlowStart(10.0), [started("a:1")]
    slow_start.tend(states, 0.0)
    states.append(started("b:1"))  # The fleet begins, and those that begin it are all needed.
    slow_start.tend(states, 9.0)
    assert limits(states) == [None, None]
    states.append(started("c:1"))
    index = FleetIndex(states)
    seen = []
    for now in (11.0, 11.1, 13.5, 20.9, 21.0):
        slow_start.tend(states, now)
        index.check()
        seen.append((states[2].seat_limit, states[2].free_seats))
    assert seen == [(1, 1), (1, 1), (3, 3), (10, 10), (None, 10)]
    assert limits(states[:2]) == [None, None]


def test_its_seats_in_use_count() -> None:
    slow_start, states = SlowStart(10.0), [started("a:1"), started("b:1")]
    slow_start.tend(states[:1], 0.0)
    slow_start.tend(states, 20.0)
    slow_start.tend(states, 22.5)
    states[1].sent("1", "x")
    states[1].reported(Report(free_seats=9, free_slots=3, received=1))
    assert (states[1].seat_limit, states[1].free_seats) == (3, 2)
    states[1].check()


def test_who_was_ready_before_does_not_warm_up_again_but_another_start_of_it_does() -> None:
    slow_start, states = SlowStart(10.0), [started("a:1"), started("b:1")]
    slow_start.tend(states, 0.0)
    states[1].phase = Phase.CONNECTING
    slow_start.tend(states, 20.0)
    states[1].phase = Phase.READY
    slow_start.tend(states, 21.0)
    assert limits(states) == [None, None]
    states[1].instance_id = "2"
    slow_start.tend(states, 22.0)
    assert limits(states) == [None, 1]
    states[1].phase = Phase.HUNG
    states[1].instance_id = "3"
    slow_start.tend(states, 23.0)
    assert limits(states) == [None, None]


def test_nobody_warms_up_where_nobody_else_serves() -> None:
    slow_start, states = SlowStart(10.0), [started("a:1"), started("b:1")]
    slow_start.tend(states[:1], 0.0)
    slow_start.tend(states, 20.0)
    assert limits(states) == [None, 1]
    states[0].cordoned = True
    slow_start.tend(states, 21.0)
    assert limits(states) == [None, None]
    alone = SlowStart(10.0)
    for now in (0.0, 20.0):
        alone.tend([], now)
    late = started("c:1")
    alone.tend([late], 40.0)
    assert late.seat_limit is None


def test_without_slow_start_there_is_none() -> None:
    slow_start, states = SlowStart(0.0), [started("a:1"), started("b:1")]
    slow_start.tend(states[:1], 0.0)
    slow_start.tend(states, 20.0)
    assert limits(states) == [None, None]


def fail(breaker: Breaker, states: list[ExecutorState], times: int, now: float = 0.0) -> None:
    for number in range(times):
        breaker.failed(states[0], f"f{number}", now, states)


def test_who_fails_gets_nothing_for_a_while_and_then_one() -> None:
    breaker, states = Breaker(5), [started("a:1"), started("b:1")]
    index = FleetIndex(states)
    fail(breaker, states, 4)
    assert states[0].takes_requests
    fail(breaker, states, 1)
    assert (states[0].tripped, states[0].takes_requests, states[0].serves) == (True, False, True)
    breaker.tend(states, PAUSE_S - 0.1)
    assert not states[0].takes_requests
    breaker.tend(states, PAUSE_S)
    assert states[0].takes_requests
    states[0].sent("probe", "")
    assert not states[0].takes_requests and states[0].tripped
    breaker.tend(states, 2 * PAUSE_S)  # Not judged yet.
    assert not states[0].takes_requests
    breaker.served(states[0], "older", 2 * PAUSE_S)
    assert states[0].tripped
    breaker.served(states[0], "probe", 2 * PAUSE_S)
    assert not states[0].tripped and states[0].takes_requests
    index.check()


def test_each_failed_probe_doubles_the_pause_and_one_without_a_verdict_is_repeated() -> None:
    breaker, states = Breaker(1), [started("a:1"), started("b:1")]
    fail(breaker, states, 1)
    now = PAUSE_S
    for pause in (2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, 60.0, 60.0):
        breaker.tend(states, now)
        states[0].sent("probe", "")
        breaker.failed_probe(states[0], "probe", now)
        states[0].ended("probe")
        breaker.tend(states, now + pause - 0.1)
        assert not states[0].half_open
        now += pause
    breaker.tend(states, now)
    states[0].sent("cancelled", "")
    states[0].ended("cancelled")
    breaker.tend(states, now)
    assert states[0].half_open


def test_what_is_proven_late_makes_no_pause_longer() -> None:
    """Other requests that it had failed before, and that another one serves now."""
    breaker, states = Breaker(1), [started("a:1"), started("b:1")]
    fail(breaker, states, 1)
    for now in (1.0, 2.0):
        breaker.failed(states[0], "", now, states)
    breaker.tend(states, PAUSE_S)
    assert states[0].half_open


def test_failures_count_beside_what_is_served_and_for_a_while() -> None:
    breaker, states = Breaker(2), [started("a:1"), started("b:1")]
    fail(breaker, states, 1)
    for number in range(4):  # As many as are remembered.
        breaker.served(states[0], str(number), 1.0)
    fail(breaker, states, 1, now=2.0)
    assert not states[0].tripped
    fail(breaker, states, 1, now=2.1 + WINDOW_S)
    assert not states[0].tripped
    fail(breaker, states, 1, now=2.2 + WINDOW_S)
    assert states[0].tripped


def test_half_are_tripped_at_most_and_never_the_last_that_takes_requests() -> None:
    breaker, states = Breaker(1), [started(f"{name}:1") for name in "abcde"]
    for state in states:
        breaker.failed(state, "x", 0.0, states)
    assert [state.tripped for state in states] == [True, True, False, False, False]
    for state in states[2:4]:
        state.phase = Phase.DRAINING
    breaker.tend(states, 1.0)
    assert not states[0].takes_requests
    states[4].cordoned = True
    breaker.tend(states, 2.0)
    assert [state.takes_requests for state in states[:2]] == [True, False]
    alone = [started("z:1")]
    Breaker(1).failed(alone[0], "x", 0.0, alone)
    assert not alone[0].tripped
    off = Breaker(0)
    fail(off, states, 9)
    assert not states[0].tripped


def test_who_comes_back_begins_anew() -> None:
    breaker, states = Breaker(2), [started("a:1"), started("b:1")]
    fail(breaker, states, 1)
    states[0].reset()
    states[0].limits = Limits(9, 9, MODULES, 1, 1)
    fail(breaker, states, 1)
    assert not states[0].tripped
    fail(breaker, states, 1)
    assert states[0].tripped
    states[0].reset()
    assert not states[0].tripped
