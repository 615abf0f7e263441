"""A version that has no slot gets one in time, whoever else wants it and whichever scheduler they come by."""

from dataclasses import replace

import pytest

from scheduler.dispatch.cold import ColdNotice
from scheduler.dispatch.policy import Placement
from scheduler.fleet.residency import Copy, Tier
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report
from tests.support.services.planning import MODULES, Fleet, executor, queue_of, request

HOT = ["A", "B", "C", "D"]


def slot(digest: str, pinned: bool = False) -> Copy:
    return Copy(digest, Tier.SLOT, 0, 1, pinned)


def full_of_hot(*, seats: int = 40, pinned: str = "", aging_s: float = 2.0) -> tuple[Fleet, ExecutorState]:
    """All four slots are claimed, A's for the longest."""
    state = executor(seats=seats, slots=4)
    for number, digest in enumerate(HOT):
        state.sent(digest, digest)
        assert state.moved(number + 1, [slot(digest, digest in pinned)], [], 0.0)
    state.reported(Report(free_seats=seats - 4, free_slots=0, received=4))
    return Fleet(queue_of(), state, aging_s=aging_s), state


def add(fleet: Fleet, *requests: tuple[int, str]) -> None:
    for number, digest in requests:
        assert fleet.queue.add(request(number, digest)) is None


def test_who_is_passed_over_for_long_gets_the_slot_of_who_has_been_there_longest() -> None:
    fleet, state = full_of_hot()
    add(fleet, (1, "cold"), *((10 + n, digest) for n, digest in enumerate(HOT)))
    assert sorted(fleet.numbers(0.0)) == [10, 11, 12, 13]
    assert fleet.policy.tend(1.9) == []
    assert fleet.policy.tend(2.0) == [ColdNotice("a:1", "cold", 2.0)]
    assert fleet.policy.tend(2.1) == []
    add(fleet, (20, "A"), (21, "B"))
    assert fleet.numbers(2.2) == [21]  # A is closed.
    state.ended("A")
    state.ended("10")
    state.reported(replace(state.report, free_slots=1, received=9))
    assert fleet.numbers(3.0) == [1]
    assert state.moved(5, [slot("cold")], [("A", Tier.SLOT)], 3.0)
    state.reported(replace(state.report, free_slots=0, received=10))
    assert fleet.numbers(3.1) == [] and not any(map(fleet.policy.cold.closed, HOT))
    assert fleet.policy.tend(3.2) == []  # The dispatch has told the executor.
    assert fleet.policy.tend(4.3) == [ColdNotice("a:1", "A", 4.3 - 2.2)]  # Its turn to be passed over.


def test_without_aging_a_place_is_told_as_a_wait_and_not_as_the_end_of_one() -> None:
    fleet, _ = full_of_hot(aging_s=0.0)
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    [notice] = fleet.policy.tend(0.0)
    assert notice.waiting_s > 0


def test_several_are_let_in_at_once_up_to_half_of_the_slots() -> None:
    fleet, _ = full_of_hot()
    add(fleet, *((n, f"cold{n}") for n in range(5)))
    fleet.plan(0.0)
    assert [notice.digest for notice in fleet.policy.tend(2.0)] == ["cold0", "cold1"]
    assert [digest for digest in HOT if fleet.policy.cold.closed(digest)] == ["A", "B"]


def test_a_wait_is_told_again_for_as_long_as_it_lasts() -> None:
    """Executors forget what is not: its scheduler may stand still."""
    fleet, _ = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    told = [notice for step in range(20) for notice in fleet.policy.tend(2.0 + step / 4)]
    assert told == [ColdNotice("a:1", "cold", waited) for waited in (2.0, 3.0, 4.0, 5.0, 6.0)]
    fleet.queue.discard(1)
    assert fleet.policy.tend(8.0) == [ColdNotice("a:1", "cold", 0.0)]
    assert fleet.policy.tend(9.0) == []


def test_tenants_get_places_by_turns() -> None:
    fleet, _ = full_of_hot()
    for number in range(6):
        fleet.queue.add(request(number, f"many{number}", "many"))
    fleet.plan(0.0)
    fleet.queue.add(request(9, "one", "few"))
    fleet.plan(0.1)
    assert [notice.digest for notice in fleet.policy.tend(9.0)] == ["many0", "one"]


def test_pinned_versions_are_not_closed() -> None:
    fleet, _ = full_of_hot(pinned="AB")
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    fleet.policy.tend(2.0)
    assert [digest for digest in HOT if fleet.policy.cold.closed(digest)] == ["C"]


def test_nobody_waits_in_the_line_of_an_executor_whose_slots_are_all_pinned() -> None:
    """Neither when they are pinned before it gets a place, nor after."""
    pinned, other = executor("a:1", slots=1), executor("b:1", slots=1)
    for state, digest in ((pinned, "A"), (other, "B")):
        state.sent(digest, digest)
        assert state.moved(1, [slot(digest, digest == "A")], [], 0.0)
        state.reported(Report(free_seats=7, free_slots=0, received=1))
    fleet = Fleet(queue_of(request(1, "cold")), pinned, other, aging_s=2.0)
    fleet.plan(0.0)
    assert fleet.policy.tend(2.0) == [ColdNotice("b:1", "cold", 2.0)]
    assert pinned.moved(2, [slot("A")], [], 2.1)
    assert other.moved(2, [slot("B", pinned=True)], [], 2.1)
    told = fleet.policy.tend(2.5)
    assert told == [ColdNotice("b:1", "cold", 0.0), ColdNotice("a:1", "cold", 2.5)]


def test_a_free_slot_belongs_to_the_first_in_the_line() -> None:
    """Not to who comes later, however fair that would be."""
    fleet, state = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    fleet.policy.tend(2.0)
    fleet.queue.add(request(2, "late", "another"))
    state.ended("D")
    state.reported(replace(state.report, free_slots=1))
    assert fleet.plan(2.1) == [Placement(1, "a:1")]
    assert 2 in fleet.queue


def test_all_schedulers_close_the_same_and_leave_free_slots_to_the_first() -> None:
    """The other one's versions are known only by what the executor repeats."""
    fleet, state = full_of_hot()
    state.reported(replace(state.report, cold=(("theirs", -5.0), ("later", -1.0), ("more", -0.5))))
    add(fleet, (1, "A"), (2, "B"), (3, "C"), (4, "own"))
    assert fleet.numbers(0.0) == [3]
    assert fleet.policy.tend(3.0) == []  # No place is free in the line.
    state.ended("A")
    state.reported(replace(state.report, free_slots=1))
    assert fleet.numbers(3.0) == []  # It belongs to "theirs".
    state.reported(replace(state.report, cold=()))
    one_of_two, reopened = fleet.numbers(3.1)
    assert {one_of_two, reopened} in ({1, 2}, {4, 2})


def test_a_place_is_taken_back_when_nobody_waits_any_more() -> None:
    fleet, _ = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    fleet.policy.tend(2.0)
    fleet.queue.discard(1)
    assert fleet.policy.tend(2.3) == [ColdNotice("a:1", "cold", 0.0)]
    assert not any(map(fleet.policy.cold.closed, HOT))


def test_a_place_on_an_executor_that_is_lost_is_given_elsewhere() -> None:
    fleet, state = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    fleet.policy.tend(2.0)
    state.reset()
    state.phase = Phase.HUNG
    assert fleet.policy.tend(2.3) == []
    state.limits = Limits(1024, 16, MODULES, max_loras=4, max_seats=40)
    state.phase = Phase.READY
    fleet.plan(2.4)
    assert [notice.digest for notice in fleet.policy.tend(2.5)] == ["cold"]


@pytest.mark.parametrize("how", ["cordon", "trial", "drain"])
def test_an_executor_that_takes_nothing_for_a_while_does_not_go_on_repeating_a_wait(how: str) -> None:
    """Else every scheduler keeps slots free there, for nobody, when it takes requests again."""
    fleet, state = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    fleet.policy.tend(2.0)
    match how:
        case "cordon":
            state.cordoned = True
        case "trial":
            state.on_trial = True
        case _:
            state.phase = Phase.DRAINING
    assert fleet.policy.tend(2.3) == [ColdNotice("a:1", "cold", 0.0)]
    assert fleet.policy.tend(2.6) == []


def test_a_version_that_still_runs_where_it_is_closed_has_no_place_there() -> None:
    """Its end would not be told: a dispatch of it is known there since before."""
    fleet, state = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    fleet.policy.tend(2.0)
    add(fleet, (2, "A"))
    assert fleet.numbers(2.1) == []  # A is closed.
    assert {notice.digest for notice in fleet.policy.tend(4.2)} == {"cold"}
    state.ended("A")
    fleet.plan(4.3)
    assert fleet.policy.tend(4.3) == [ColdNotice("a:1", "A", pytest.approx(2.2))]


def test_requests_of_one_version_that_need_different_executors_have_places_on_both() -> None:
    """The one that starts first does not leave its place to the other, which cannot use it."""
    short, long = executor("a:1", slots=1, length=100), executor("b:1", slots=1, length=200)
    for state, digest in ((short, "A"), (long, "B")):
        state.sent(digest, digest)
        assert state.moved(1, [slot(digest)], [], 0.0)
        state.reported(Report(free_seats=7, free_slots=0, received=1))
    queue = queue_of(request(1, "cold", length=50), request(2, "cold", length=150))
    fleet = Fleet(queue, short, long, aging_s=2.0)
    assert fleet.numbers(0.0) == []
    told = fleet.policy.tend(2.0)
    assert {notice.address for notice in told} == {"a:1", "b:1"}
    short.ended("A")
    short.reported(Report(free_seats=8, free_slots=1, received=1))
    assert fleet.plan(2.1) == [Placement(1, "a:1")]
    short.ended("1")
    assert fleet.policy.tend(2.3) in ([], [ColdNotice("a:1", "cold", 0.0)])
    short.reported(Report(free_seats=8, free_slots=1, received=2))
    fleet.plan(2.4)
    assert not fleet.policy.cold.held & 1  # Nobody waits there any more.
    long.ended("B")
    long.reported(Report(free_seats=8, free_slots=1, received=1))
    assert fleet.plan(2.5) == [Placement(2, "b:1")]


def test_a_version_that_runs_only_on_a_cordoned_executor_is_cold() -> None:
    fleet, state = full_of_hot()
    add(fleet, (1, "A"))
    state.cordoned = True
    other = executor("b:1", slots=1)
    other.sent("busy", "Z")
    assert other.moved(1, [slot("Z")], [], 0.0)
    other.reported(Report(free_seats=4, free_slots=0, received=1))
    both = Fleet(fleet.queue, state, other, aging_s=2.0)
    assert both.plan(0.0) == []
    assert both.policy.tend(2.0) == [ColdNotice("b:1", "A", 2.0)]
    assert both.policy.cold.closed("Z")


def test_a_wait_goes_on_when_an_executor_comes_that_takes_other_lengths() -> None:
    """All that wait are grouped anew by it."""
    first, later = executor(slots=1, length=200), executor("b:1", slots=1, length=100)
    later.limits = None
    first.sent("A", "A")
    assert first.moved(1, [slot("A")], [], 0.0)
    first.reported(Report(free_seats=7, free_slots=0, received=1))
    queue = queue_of(request(1, "cold", length=50), request(2, "cold", length=150))
    fleet = Fleet(queue, first, later, aging_s=2.0)
    assert fleet.numbers(0.0) == []
    later.limits = Limits(100, 4, MODULES, max_loras=1, max_seats=8)
    assert fleet.numbers(1.5) == []
    assert len(queue.lanes("cold")) == 2
    assert [notice.waiting_s for notice in fleet.policy.tend(2.0)] == [2.0]


def test_a_wait_goes_on_when_an_attempt_comes_to_nothing() -> None:
    """Again and again, if need be: else who is refused each time would never have waited for long."""
    fleet, state = full_of_hot()
    add(fleet, (1, "cold"))
    fleet.plan(0.0)
    for tries in range(3):
        state.reported(replace(state.report, free_slots=1, received=4 + tries))
        assert fleet.numbers(0.5 + tries / 2) == [1]
        assert state.ended("1")
        fleet.queue.put_back(request(1, "cold"), 0.0)
        state.reported(replace(state.report, free_slots=0, received=5 + tries))
        assert fleet.numbers(0.6 + tries / 2) == []
    assert fleet.policy.tend(2.0) == [ColdNotice("a:1", "cold", 2.0)]


def test_who_was_answered_meanwhile_waits_from_then_on() -> None:
    fleet, _ = full_of_hot()
    fleet.queue.add(request(1, "cold"))
    fleet.queue.put_back(fleet.queue.take(1), 1.0)
    fleet.plan(1.5)
    assert fleet.policy.tend(2.9) == []
    assert fleet.policy.tend(3.0) == [ColdNotice("a:1", "cold", 2.0)]


def test_a_wait_begins_also_while_all_seats_are_taken() -> None:
    fleet, _ = full_of_hot(seats=4)
    add(fleet, (1, "cold"))
    assert fleet.numbers(0.0) == []
    assert fleet.policy.tend(2.0) == [ColdNotice("a:1", "cold", 2.0)]


def test_one_slot_hot_traffic_and_one_cold_request() -> None:
    """It starts after aging and what runs, as a step of a simulation with endless traffic shows."""
    state = executor(seats=2, slots=1)
    fleet = Fleet(queue_of(), state, aging_s=2.0)
    running: list[str] = []
    number = 0
    started = None
    for now in range(40):
        while fleet.queue.group_size("A") < 3:
            number += 1
            fleet.queue.add(request(number, "A", "hot"))
        if now == 5:
            fleet.queue.add(request(10_000, "B", "cold"))
        if len(running) == 2 or (running and now % 2):
            state.ended(running.pop(0))
        digests = {"B" if name == "10000" else "A" for name in running}
        free = Report(free_seats=2 - len(running), free_slots=1 - len(digests), received=state.num_sent)
        state.reported(free)
        fleet.policy.tend(now)
        running += [str(placed) for placed in fleet.numbers(now)]
        if digests and not state.residency.in_slots():
            assert state.moved(1, [slot("A")], [], now)
        if started is None and "10000" in running:
            started = now
    assert started is not None and started <= 5 + 2 + 2 + 2
