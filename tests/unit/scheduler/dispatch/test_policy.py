import sys
from dataclasses import replace
from types import FrameType

import pytest

from scheduler.dispatch.groups import Lane, Turn
from scheduler.dispatch.policy import MAX_LOOKS, MIN_KEPT, Placement
from scheduler.dispatch.queue import Queue
from scheduler.fleet.index import FleetIndex
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import ExecutorState, Phase, Report
from tests.support.services.planning import Fleet, executor, plan, queue_of, request


def test_an_unplaceable_version_blocks_nobody() -> None:
    """The base and five versions over 4 slots: all go but the requests for one of the five."""
    order = ["", "", "", "1", "3", "2", "4", "5", "5", "5", "5", "", "", "1", "2", "3"]
    queue = queue_of(*(request(number, digest) for number, digest in enumerate(order)))
    placed = plan(queue, executor(seats=64, slots=4))
    assert len(queue.digests()) == 1
    assert {p.number for p in placed} == {
        n for n, digest in enumerate(order) if digest not in queue.digests()
    }


def test_never_more_than_the_free_seats() -> None:
    queue = queue_of(*(request(number) for number in range(10)))
    assert len(plan(queue, executor(seats=3))) == 3
    assert len(queue) == 7


def test_slot_before_host_before_room() -> None:
    def three() -> list[ExecutorState]:
        return [executor("a:1", 99), executor("b:1", x=Tier.HOST), executor("c:1", 2, x=Tier.SLOT)]

    assert plan(queue_of(request(1, "x")), *three()) == [Placement(1, "c:1")]
    assert plan(queue_of(request(1, "x")), *three()[:2]) == [Placement(1, "b:1")]
    assert plan(queue_of(request(1)), *three()) == [Placement(1, "a:1")]


def test_requests_of_one_version_share_one_slot() -> None:
    placed = plan(queue_of(*(request(n, "x") for n in range(4))), executor("a:1"), executor("b:1"))
    assert len({p.address for p in placed}) == 1


def test_a_version_whose_executor_is_full_takes_a_slot_of_another() -> None:
    placed = plan(queue_of(*(request(n, "x") for n in range(6))), executor("a:1", 4), executor("b:1", 4))
    assert len({p.address for p in placed}) == 2 and len(placed) == 6


def test_equals_are_taken_by_turns_and_every_scheduler_begins_elsewhere() -> None:
    states = [executor(f"e:{n}", seats=4) for n in range(8)]
    fleet = Fleet(queue_of(*(request(n) for n in range(8))), *states)
    assert len({placement.address for placement in fleet.plan()}) == 8
    firsts = set()
    for salt in range(8):
        index = FleetIndex([executor(f"e:{n}") for n in range(8)])
        placement = type(fleet.policy)(queue_of(request(1)), index, 1.0, salt).next(0.0)
        assert placement
        firsts.add(placement.address)
    assert len(firsts) == 8


def test_no_slot_here_but_room_there() -> None:
    full = executor("a:1", seats=9, slots=1)
    full.sent("other", "y")
    assert plan(queue_of(request(1, "x")), full, executor("b:1", 1, 1)) == [Placement(1, "b:1")]


def test_where_an_attempt_failed_is_the_last_choice() -> None:
    states = [executor("a:1", x=Tier.SLOT), executor("b:1")]
    assert plan(queue_of(request(1, "x", avoid=["a:1"])), *states) == [Placement(1, "b:1")]
    assert plan(queue_of(request(1, "x", avoid=["a:1"])), executor("a:1")) == [Placement(1, "a:1")]


def test_where_it_was_refused_is_no_choice() -> None:
    states = [executor("a:1", x=Tier.SLOT), executor("b:1")]
    refused = request(1, "x", refused=["a:1"])
    assert plan(queue_of(refused), *states) == [Placement(1, "b:1")]
    assert plan(queue_of(refused), states[0]) == []
    needs = Queue(1, 1).needs(refused)
    assert needs.refused == {"a:1"}


def test_one_that_only_others_can_take_holds_nobody_up() -> None:
    """Neither those behind it in the same version, nor itself when the others have room again."""
    states = [executor("short:1", length=100), executor("long:1", seats=0, length=1000)]
    queue = queue_of(request(1, "x", length=500), request(2, "x", length=50), request(3, "x", length=150))
    fleet = Fleet(queue, *states)
    assert fleet.plan() == [Placement(2, "short:1")]
    states[1].reported(Report(free_seats=9, free_slots=4))
    assert fleet.plan() == [Placement(1, "long:1"), Placement(3, "long:1")]


def test_unready_and_cordoned_executors_get_nothing_until_they_are_back() -> None:
    cordoned, hung = executor("a:1"), executor("b:1")
    cordoned.cordoned = True
    hung.phase = Phase.HUNG
    fleet = Fleet(queue_of(request(1), request(2, "x")), cordoned, hung)
    assert fleet.plan() == []
    hung.phase = Phase.READY
    assert fleet.plan() == [Placement(1, "b:1"), Placement(2, "b:1")]


def test_an_executor_that_cannot_hold_it_is_passed() -> None:
    small = executor("a:1", rank=4, x=Tier.SLOT)
    queue = queue_of(request(1, "x", rank=8), request(2, "y", rank=4))
    assert plan(queue, small) == [Placement(2, "a:1")]
    needs = queue.needs(queue[1])
    assert not FleetIndex([small]).may_ever_run(needs)
    assert FleetIndex([small, executor("b:1")]).may_ever_run(needs)
    assert FleetIndex([small, ExecutorState("c:1")]).may_ever_run(needs)
    assert FleetIndex([]).may_ever_run(needs)


def test_the_last_seats_are_for_tenants_with_nothing_running_there() -> None:
    fleet = Fleet(queue_of(*(request(n, tenant="flood") for n in range(20))), executor(seats=8), reserve=1)
    assert len(fleet.plan()) == 7
    fleet.queue.add(request(90, tenant="light"))
    fleet.queue.add(request(91, tenant="light"))
    assert fleet.numbers() == [90]
    few = Fleet(queue_of(*(request(n, tenant="flood") for n in range(20))), executor(seats=7), reserve=1)
    assert len(few.plan()) == 7


def test_a_tenant_has_as_many_of_the_last_seats_as_there_are() -> None:
    """Of 24 seats three, however many are to be kept."""
    state = executor(seats=24)
    fleet = Fleet(queue_of(*(request(n, tenant="flood") for n in range(30))), state, reserve=4)
    assert len(fleet.plan()) == 21
    for number in range(90, 95):
        fleet.queue.add(request(number, tenant="light"))
    assert fleet.numbers() == [90, 91, 92]
    fleet.index.check()


def test_a_reserved_seat_that_frees_is_given_to_who_waits_for_it() -> None:
    state = executor(seats=8)
    fleet = Fleet(queue_of(*(request(n, tenant=f"t{n}") for n in range(8))), state, reserve=1)
    assert len(fleet.plan()) == 8
    for number, tenant in [(20, "t1"), (21, "t2"), (22, "late")]:
        fleet.queue.add(request(number, tenant=tenant))
    state.ended("7")
    state.reported(Report(free_seats=1, free_slots=4, received=8))
    assert fleet.numbers() == [22]


def test_what_cannot_run_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much waits, only what an event may have given a place is examined."""
    state = executor(seats=50, slots=1)
    queue = queue_of(*(request(n, f"v{n}", tenant=f"t{n}") for n in range(100)))
    fleet = Fleet(queue, state)
    assert len(fleet.plan()) == 1
    looks = []
    places = fleet.policy._places
    monkeypatch.setattr(fleet.policy, "_places", lambda lane: looks.append(lane) or places(lane))
    state.reported(Report(free_seats=49, free_slots=0, received=1))
    assert fleet.policy.next(0.0) is None
    queue.add(request(200))
    assert fleet.policy.next(0.0) == Placement(200, "a:1")
    assert len(looks) <= 2


def test_many_that_find_no_place_are_looked_at_in_parts() -> None:
    """So that one call never takes long, whatever has gathered while nobody had room."""
    state = executor(seats=50, slots=1)
    queue = Queue(10_000, 10_000)
    for number in range(3 * MAX_LOOKS):
        queue.add(request(number, f"v{number}"))
    fleet = Fleet(queue, state)
    assert fleet.policy.next(0.0) == Placement(0, "a:1")
    state.sent("0", queue.take(0).digest)
    assert fleet.policy.next(0.0) is None and fleet.policy.has_more
    queue.add(request(9_999))
    assert fleet.numbers() == [9_999] and not fleet.policy.has_more


def test_who_runs_where_no_seat_is_left_is_not_looked_at_one_by_one() -> None:
    """Of many versions that one executor runs, one gets the seat; then who runs elsewhere is looked at."""
    many = {f"v{number}": number for number in range(2 * MAX_LOOKS)}
    crowded, other = executor("a:1", slots=len(many)), executor("b:1")
    for number, digest in enumerate(many):
        crowded.sent(f"running{number}", digest)
    other.sent("other", "x")
    crowded.reported(Report(received=len(many)))
    other.reported(Report(received=1))
    queue = Queue(10_000, 10_000)
    for digest, number in many.items():
        queue.add(request(number, digest))
        queue.add(request(number + len(many), digest))
    for number in range(5000, 5002):
        queue.add(request(number, "x"))
    fleet = Fleet(queue, crowded, other)

    def calls() -> int:
        """Of the policy, with one more seat at each, until both are taken."""
        for state in (crowded, other):
            state.reported(Report(free_seats=1, received=state.num_sent))
        count = placed = 0
        while placed < 2:
            count += 1
            if placement := fleet.policy.next(0.0):
                item = queue.take(placement.number)
                fleet.states[placement.address].sent(str(item.number), item.digest)
                placed += 1
        return count

    assert calls() > 2  # They were new, and had to be looked at.
    assert calls() == 2


def test_a_report_is_no_look_at_who_waits_for_other_executors() -> None:
    """As many executors as there are, each with a version of its own that waits for a seat there."""

    def calls(executors: int) -> int:
        """Of Python functions, in a plan after a report of one of them."""
        states = [executor(f"e:{at}", slots=1) for at in range(executors)]
        queue = Queue(10_000, 10_000)
        for at, state in enumerate(states):
            state.sent("running", f"v{at}")
            state.reported(Report(received=1))
            queue.add(request(at, f"v{at}", tenant=f"t{at}"))
        fleet = Fleet(queue, *states)
        states[0].reported(Report(free_seats=2, received=1))
        assert fleet.numbers() == [0]  # All others were looked at, and wait where their version runs.
        assert fleet.policy.num_crowded == executors - 1
        states[1].reported(Report(free_seats=1, received=1))
        count = 0

        def counted(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            placement = fleet.policy.next(0.0)
        finally:
            sys.setprofile(None)
        assert placement and placement.number == 1
        return count

    assert calls(400) <= calls(50) + 10


def test_places_where_versions_once_ran_are_forgotten() -> None:
    """A version moves on, and waits for a seat in each place for a while."""
    states = [executor(f"e:{at}", slots=2) for at in range(200)]
    queue = queue_of(request(1, "x"), request(2, "x"))
    fleet = Fleet(queue, *states)
    for state in states:
        state.reported(Report())
    for at, state in enumerate(states):
        state.sent(f"{at}", "x")
        states[-1].reported(Report(free_seats=1, free_slots=0))
        assert fleet.plan() == []
        state.ended(f"{at}")
    assert fleet.policy.num_crowded <= 2 * MIN_KEPT + 1


class CountingQueue(Queue):
    """Counts looks at turns."""

    looks = 0

    def turn(self, lane: Lane) -> Turn | None:
        self.looks += 1
        return super().turn(lane)


def test_a_version_waits_for_a_seat_in_one_line_only() -> None:
    """Also when more of it come meanwhile: whoever is placed is put right once, and looked at three times."""
    versions, executors = 80, 10
    states = [executor(f"e:{at}", slots=versions // executors) for at in range(executors)]
    queue = CountingQueue(10_000, 10_000)
    fleet = Fleet(queue, *states)
    numbers = iter(range(10_000))

    def come(version: int) -> None:
        queue.add(request(next(numbers), f"v{version}", tenant=f"t{version}"))

    for version in range(versions):
        states[version % executors].sent(f"running {version}", f"v{version}")
        come(version)
        come(version)
    for seats in (0, 1, 2, 1):
        for at, state in enumerate(states):
            state.reported(Report(free_seats=seats + at % 2 if seats else 0, received=state.num_sent))
        queue.looks = 0
        placed = []
        while placement := fleet.policy.next(0.0):
            placed.append(queue.take(placement.number, placement.address))
            fleet.states[placement.address].sent(str(placement.number), placed[-1].digest)
        assert bool(placed) == bool(seats)
        assert queue.looks <= 3 * len(placed) or not seats
        for item in placed:
            come(int(item.digest[1:]))
        assert fleet.plan() == []


def test_versions_of_a_tenant_that_waits_alone_are_not_looked_at_again_for_each_placement() -> None:
    """Each placement is charged to the tenant of all of them, and moves none of them against another."""
    versions = [f"v{number}" for number in range(100)]
    state = executor("a:1", slots=len(versions))
    for digest in versions:
        state.sent(f"running {digest}", digest)
    queue = CountingQueue(10_000, 10_000)
    for number in range(300):
        queue.add(request(number, versions[number % 100]))
    fleet = Fleet(queue, state)
    for free in (1, 20):
        state.reported(Report(free_seats=free, received=state.num_sent))
        queue.looks = 0
        for _ in range(free):
            placement = fleet.policy.next(0.0)
            assert placement
            state.sent(f"{placement.number}", queue.take(placement.number).digest)
    assert queue.looks <= 4 * free  # In the second round: all came in before.
    queue.add(request(1000, "v50", tenant="other"))
    state.reported(Report(free_seats=2, received=state.num_sent))
    # Who comes then starts with all that was charged, as an equal.
    assert fleet.numbers() == [21, 1000]


def test_a_hint_goes_where_a_version_will_likely_run() -> None:
    states = [executor("a:1", slots=1, x=Tier.DISK), executor("b:1", slots=4, y=Tier.HOST)]
    policy = Fleet(queue_of(*(request(n, d) for n, d in enumerate("xyz"))), *states).policy
    assert policy.likely("x") is states[0]
    assert policy.likely("z") is states[1]
    assert policy.likely("y") is None
    assert policy.likely("") is None
    assert Fleet(queue_of(request(1, "z"))).policy.likely("z") is None
    assert [policy.room_in_s(state) for state in (states[0], executor("c:1", slots=0))] == [0.0, 1.0]
    assert Fleet(queue_of(replace(request(1, "z"), max_rank=64)), *states).policy.likely("z") is None
