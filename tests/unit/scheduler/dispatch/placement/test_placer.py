"""Where requests go: to copies, homes and sessions' last executors, and never past a free seat."""

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from scheduler.dispatch.placement.placer import PlacementSettings
from scheduler.dispatch.placement.rendezvous import Rendezvous
from scheduler.dispatch.policy import Policy
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.residency import Copy, Residency, Tier
from scheduler.fleet.state import ExecutorState, Report
from tests.support.services.planning import Fleet, executor, queue_of, request

SEATS, SLOTS = 64, 16


def pods(number: int, seats: int = SEATS, slots: int = SLOTS) -> list[ExecutorState]:
    return [executor(f"pod-{at}", seats, slots) for at in range(number)]


def version_of(states: Sequence[ExecutorState], home: ExecutorState) -> str:
    """A version that is at home there, while nothing is known of traffic."""
    rendezvous = Rendezvous([state.name for state in states], [float(SLOTS)] * len(states))
    return next(f"v{n}" for n in count() if states[rendezvous.order(f"v{n}")[0]] is home)


def run(state: ExecutorState, digest: str, requests: int) -> None:
    """So many run there, and it has reported that; the version has its slot."""
    for number in range(requests):
        state.sent(f"{digest} {number}", digest)
    state.residency = Residency.from_snapshot(
        0, [*state.residency.copies(), *([Copy(digest, Tier.SLOT, 0, 1, False)] if digest else [])]
    )
    state.reported(Report(SEATS - state.num_running, SLOTS - len(state.claimed()), received=state.num_sent))


def fill_slots(state: ExecutorState) -> None:
    """With versions that nobody uses."""
    others = [Copy(f"idle {number}", Tier.SLOT, 0, 1, False) for number in range(SLOTS)]
    state.residency = Residency.from_snapshot(0, others)


def where(states: Sequence[ExecutorState], digest: str, session: str = "") -> str:
    """One more request of the version."""
    [placement] = Fleet(queue_of(request(9_999, digest, session=session)), *states).plan()
    return placement.address


def test_a_version_that_nobody_has_goes_home() -> None:
    for home in pods(4):
        states = pods(4)
        assert where(states, version_of(states, states[int(home.name[-1])])) == home.name


def test_schedulers_send_it_to_the_same_executor() -> None:
    for number in range(20):
        chosen = set()
        for salt in range(3):
            policy = Policy(queue_of(request(1, f"v{number}")), FleetIndex(pods(8)), 1.0, salt)
            placement = policy.next(0.0)
            assert placement
            chosen.add(placement.address)
        assert len(chosen) == 1


def test_an_idle_home_draws_a_version_from_where_it_runs() -> None:
    """As one does that has come back."""
    away, home = states = pods(2)
    digest = version_of(states, home)
    run(away, digest, 8)
    assert where(states, digest) == home.name


def test_a_version_stays_where_it_runs_when_its_home_is_hardly_less_busy() -> None:
    away, home = states = pods(2)
    digest = version_of(states, home)
    run(away, digest, 8)
    run(home, "other", 7)
    assert where(states, digest) == away.name


@pytest.mark.parametrize("running, leaves", [(4, False), (16, True)])
def test_where_another_would_lose_its_slot_a_home_has_to_be_much_less_busy(
    running: int, leaves: bool
) -> None:
    away, home = states = pods(2)
    digest = version_of(states, home)
    run(away, digest, running)
    fill_slots(home)
    assert where(states, digest) == (home if leaves else away).name


@pytest.mark.parametrize("running, spreads", [(24, False), (32, True)])
def test_a_version_whose_few_requests_take_long_leaves_a_busy_home(running: int, spreads: bool) -> None:
    """So few are no heat for a second home, and all others would stay idle."""
    states = pods(3)
    home = states[1]
    digest = version_of(states, home)
    run(home, digest, running)
    assert (where(states, digest) != home.name) is spreads


def test_a_version_that_spreads_goes_where_it_is_first() -> None:
    states = pods(3)
    home, other = states[1], states[2]
    digest = version_of(states, home)
    run(home, digest, 40)
    run(other, digest, 8)
    assert where(states, digest) == other.name


def test_nobody_waits_for_a_home_while_another_has_room() -> None:
    away, home = states = pods(2)
    digest = version_of(states, home)
    run(home, "other", SEATS)
    assert where(states, digest) == away.name


def test_a_hot_version_spreads_over_all_executors() -> None:
    states = pods(8)
    fleet = Fleet(queue_of(*(request(number, "hot") for number in range(160))), *states)
    counts = Counter(placement.address for placement in fleet.plan())
    assert len(counts) == 8 and max(counts.values()) <= 30


def test_versions_with_little_traffic_stay_in_one_place() -> None:
    states = pods(8)
    fleet = Fleet(queue_of(*(request(number, f"v{number % 40}") for number in range(120))), *states)
    places = {(placement.number % 40, placement.address) for placement in fleet.plan()}
    assert len(places) == 40


def test_one_that_joins_gets_its_share_of_what_comes() -> None:
    states = pods(4)
    fleet = Fleet(queue_of(), *states)
    numbers = count()

    def come(requests: int) -> Counter[str]:
        for _ in range(requests):
            number = next(numbers)
            fleet.queue.add(request(number, f"v{number % 20}"))
        placed = fleet.plan()
        for state in fleet.states.values():
            fresh = [Copy(digest, Tier.SLOT, 0, 1, False) for digest in sorted(state.claimed())]
            state.residency = Residency.from_snapshot(0, fresh)
            free = SEATS - state.num_running, SLOTS - len(state.claimed())
            state.reported(Report(*free, received=state.num_sent))
        return Counter(placement.address for placement in placed)

    come(120)
    late = executor("late", SEATS, SLOTS)
    fleet.states[late.name] = late
    fleet.index.join(late)
    assert come(40)[late.name] >= 0.8 * 40 / 5


def test_hints_go_where_requests_will() -> None:
    states = pods(8)
    for number in range(30):
        digest = f"v{number}"
        fleet = Fleet(queue_of(request(number, digest)), *states)
        hinted = fleet.policy.likely(digest)
        [placement] = fleet.plan()
        assert hinted and hinted.name == placement.address


def session_fleet(digest: str = "", **settings: int) -> Fleet:
    """The first turn of a session has gone somewhere, and ended."""
    fleet = Fleet(queue_of(), *pods(4), placement=PlacementSettings(**settings))  # type: ignore[arg-type]
    turn(fleet, 0, digest)
    return fleet


def turn(fleet: Fleet, number: int, digest: str = "", session: str = "s") -> str:
    """The next one; it ends before the one that follows."""
    fleet.queue.add(request(number, digest, session=session))
    [placement] = fleet.plan()
    state = fleet.states[placement.address]
    if digest:
        state.residency = Residency.from_snapshot(0, [Copy(digest, Tier.SLOT, 0, 1, False)])
    state.ended(str(number))
    state.reported(Report(SEATS - state.num_running, SLOTS, received=state.num_sent))
    return placement.address


def test_a_session_stays_where_it_was() -> None:
    fleet = session_fleet()
    assert len({turn(fleet, number) for number in range(1, 9)}) == 1
    assert len({turn(fleet, number, session="") for number in range(10, 18)}) == 4


def test_a_session_leaves_an_executor_that_is_much_busier() -> None:
    fleet = session_fleet()
    last = turn(fleet, 1)
    run(fleet.states[last], "", SEATS // 8)
    assert turn(fleet, 2) == last
    run(fleet.states[last], "x", SEATS // 4)
    assert turn(fleet, 3) != last


def test_a_session_does_not_bring_its_version_where_it_is_not() -> None:
    fleet = session_fleet("x")
    last = turn(fleet, 1, "x")
    fleet.states[last].residency = Residency()
    digest = version_of(list(fleet.states.values()), next(s for n, s in fleet.states.items() if n != last))
    assert turn(fleet, 2, digest) != last


def test_a_session_whose_executor_has_left_goes_on_elsewhere() -> None:
    fleet = session_fleet()
    last = turn(fleet, 1)
    fleet.leave(last)
    assert turn(fleet, 2) != last


def test_remembered_sessions_are_bounded() -> None:
    fleet = session_fleet(max_sessions=4)
    places = [turn(fleet, number, session=f"s{number}") for number in range(1, 9)]
    assert turn(fleet, 20, session="s8") == places[-1]
    fleet.check()
