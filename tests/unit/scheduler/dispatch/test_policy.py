from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.dispatch.policy import Placement, Policy, can_ever_run, likely_executor
from scheduler.dispatch.queue import Queue, Waiting
from scheduler.fleet.residency import Copy, Residency, Tier
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report

MODULES = frozenset({"q_proj"})


def executor(address: str = "a:1", seats: int = 8, slots: int = 4, **resident: Tier) -> ExecutorState:
    state = ExecutorState(address, phase=Phase.READY)
    state.limits = Limits(1024, 16, MODULES, max_loras=slots, max_seats=seats)
    state.residency = Residency.from_snapshot(
        0, [Copy(digest, tier, 0, 1, False) for digest, tier in resident.items()]
    )
    state.reported(Report(free_seats=seats, free_slots=slots))
    return state


def request(number: int, digest: str, tenant: str = "t", rank: int = 8, avoid: Iterable[str] = ()) -> Waiting:
    if not digest:
        return Waiting(number, tenant, "", 0, 1, 0, frozenset(), frozenset(avoid))
    return Waiting(number, tenant, digest, 0, 1, rank, MODULES, frozenset(avoid))


def queue_of(*requests: Waiting) -> Queue:
    queue = Queue(1000, 1000)
    for item in requests:
        assert queue.add(item) is None
    return queue


def send(placements: list[Placement], digests: dict[int, str], *states: ExecutorState) -> None:
    by_address = {state.address: state for state in states}
    for placement in placements:
        by_address[placement.address].sent(str(placement.number), digests[placement.number])


def test_an_unplaceable_version_blocks_nobody() -> None:
    """The base and five versions over 4 slots: all go but the requests for the fifth."""
    order = ["", "", "", "1", "3", "2", "4", "5", "5", "5", "5", "", "", "1", "2", "3"]
    queue = queue_of(*(request(number, digest) for number, digest in enumerate(order)))
    placed = Policy(aging_s=1).plan(queue, [executor(seats=64, slots=4)], now=0)
    assert {p.number for p in placed} == {n for n, digest in enumerate(order) if digest != "5"}
    assert queue.digests() == {"5"}


def test_never_more_than_the_free_seats() -> None:
    queue = queue_of(*(request(number, "") for number in range(10)))
    state = executor(seats=3)
    assert len(Policy(1).plan(queue, [state], 0)) == 3
    assert len(queue) == 7


def test_slot_before_host_before_room() -> None:
    states = [executor("a:1", seats=99), executor("b:1", x=Tier.HOST), executor("c:1", seats=2, x=Tier.SLOT)]
    placed = Policy(1).plan(queue_of(request(1, "x")), states, 0)
    assert placed == [Placement(1, "c:1")]
    assert Policy(1).plan(queue_of(request(1, "x")), states[:2], 0) == [Placement(1, "b:1")]
    assert Policy(1).plan(queue_of(request(1, "y")), states, 0) == [Placement(1, "a:1")]


def test_requests_of_one_version_share_one_slot() -> None:
    states = [executor("a:1"), executor("b:1")]
    placed = Policy(1).plan(queue_of(*(request(n, "x") for n in range(4))), states, 0)
    assert len({p.address for p in placed}) == 1


def test_no_slot_here_but_room_there() -> None:
    full = executor("a:1", seats=9, slots=1)
    full.sent("other", "y")
    placed = Policy(1).plan(queue_of(request(1, "x")), [full, executor("b:1", seats=1, slots=1)], 0)
    assert placed == [Placement(1, "b:1")]


def test_where_an_attempt_failed_is_the_last_choice() -> None:
    states = [executor("a:1", x=Tier.SLOT), executor("b:1")]
    assert Policy(1).plan(queue_of(request(1, "x", avoid=["a:1"])), states, 0) == [Placement(1, "b:1")]
    assert Policy(1).plan(queue_of(request(1, "x", avoid=["a:1"])), states[:1], 0) == [Placement(1, "a:1")]


def test_where_it_was_refused_is_no_choice() -> None:
    states = [executor("a:1", x=Tier.SLOT), executor("b:1")]
    refused = replace(request(1, "x"), refused=frozenset({"a:1"}))
    assert Policy(1).plan(queue_of(refused), states, 0) == [Placement(1, "b:1")]
    assert Policy(1).plan(queue_of(refused), states[:1], 0) == []
    assert can_ever_run(refused, states) and not can_ever_run(refused, states[:1])


def test_unready_and_cordoned_executors_get_nothing() -> None:
    cordoned, hung = executor("a:1"), executor("b:1")
    cordoned.cordoned = True
    hung.phase = Phase.HUNG
    assert Policy(1).plan(queue_of(request(1, "")), [cordoned, hung], 0) == []


def test_an_executor_that_cannot_hold_it_is_passed() -> None:
    small = executor("a:1", x=Tier.SLOT)
    small.limits = Limits(1024, 4, MODULES, 4, 8)
    queue = queue_of(request(1, "x", rank=8), request(2, "y", rank=4))
    assert Policy(1).plan(queue, [small], 0) == [Placement(2, "a:1")]
    assert not can_ever_run(request(1, "x", rank=8), [small])
    assert can_ever_run(request(1, "x", rank=8), [small, executor("b:1")])
    assert can_ever_run(request(1, "x", rank=8), [small, ExecutorState("c:1")])
    assert can_ever_run(request(1, "x", rank=8), [])


def test_a_cold_version_starts_after_aging_and_the_running_hot_requests() -> None:
    """One slot, endless traffic for A, one request for B."""
    state, policy, queue = executor(seats=2, slots=1), Policy(aging_s=2), Queue(1000, 1000)
    digests: dict[int, str] = {}
    running: list[int] = []
    number = received = 0
    started_b = None
    for now in range(40):
        while queue.group_size("A") < 3:
            number += 1
            digests[number] = "A"
            queue.add(request(number, "A", tenant="hot"))
        if now == 5:
            digests[10_000] = "B"
            queue.add(request(10_000, "B", tenant="cold"))
        if len(running) == 2 or (running and now % 2):  # One request ends about every second step.
            state.ended(str(running.pop(0)))
        slots = 0 if running else 1
        state.reported(Report(free_seats=2 - len(running), free_slots=slots, received=received))
        placed = policy.plan(queue, [state], now)
        send(placed, digests, state)
        received += len(placed)
        running += [p.number for p in placed]
        if started_b is None and 10_000 in running:
            started_b = now
    assert started_b is not None
    assert started_b <= 5 + 2 + 2 + 2  # Arrival, aging, the two running requests, one step of slack each.


def test_four_hot_and_one_cold() -> None:
    state, policy = executor(seats=8, slots=4), Policy(aging_s=2)
    for digest in "ABCD":
        state.sent(digest, digest)
    state.sent("A2", "A")
    state.reported(Report(free_seats=3, free_slots=0, received=5))
    queue = queue_of(request(1, "cold"), *(request(10 + n, d) for n, d in enumerate("ABCD")))
    assert len(policy.plan(queue, [state], now=0)) == 3
    state.reported(Report(free_seats=3, free_slots=0, received=5))
    assert {queue.head("t")} == {request(1, "cold")}
    queue.add(request(20, "B"))
    queue.add(request(21, "C"))
    placed = policy.plan(queue, [state], now=2.5)
    assert len(placed) == 2  # Of B, C and D, one is closed for the cold version.
    assert queue.group_size("B") == 1
    state.ended("B")
    state.reported(Report(free_seats=4, free_slots=1, received=5))
    assert Placement(1, "a:1") in policy.plan(queue, [state], now=3)


def test_a_hint_goes_where_a_version_will_likely_run() -> None:
    states = [executor("a:1", slots=1, x=Tier.DISK), executor("b:1", slots=4, y=Tier.HOST)]
    assert likely_executor("x", states) is states[0]
    assert likely_executor("z", states) is states[1]
    assert likely_executor("y", states) is None
    assert likely_executor("", states) is None
    assert likely_executor("z", []) is None
    policy = Policy(aging_s=2.0)
    assert [policy.room_in_s(state) for state in (states[0], executor("c:1", slots=0))] == [0.0, 2.0]


RANKS = {"": 0, "u": 4, "v": 8, "w": 64, "x": 4, "y": 8}
requests = st.lists(st.tuples(st.sampled_from(sorted(RANKS)), st.sampled_from("abc")), max_size=30)
executors = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from([4, 8])), max_size=3)


@settings(max_examples=150)
@given(requests, executors, st.lists(st.floats(0, 5), min_size=1, max_size=4))
def test_plans_respect_room_and_leave_no_work_undone(
    arrivals: list[tuple[str, str]], fleet: list[tuple[int, int, int]], times: list[float]
) -> None:
    states = []
    for index, (seats, slots, rank) in enumerate(fleet):
        state = executor(f"e:{index}", seats=seats, slots=slots)
        state.limits = Limits(1024, rank, MODULES, slots, seats)
        states.append(state)
    items = {n: request(n, digest, tenant, RANKS[digest]) for n, (digest, tenant) in enumerate(arrivals)}
    queue, policy = queue_of(*items.values()), Policy(aging_s=1)
    seen: set[int] = set()
    for now in sorted(times):
        placed = policy.plan(queue, states, now)
        assert not seen & {p.number for p in placed}
        seen |= {p.number for p in placed}
        send(placed, {number: item.digest for number, item in items.items()}, *states)
        queue.check()
    assert seen | {item.number for item in queue.requests()} == set(items)
    for state, (seats, slots, rank) in zip(states, fleet, strict=True):
        state.check()
        assert state.num_running <= seats
        assert len(state.claimed()) <= slots
        assert all(items[int(key)].max_rank <= rank for key in state.dispatch_ids())
    closing = any(now - min(times) >= 1 for now in times)
    if not closing:  # Without closed versions, nothing that fits stays behind.
        for item in queue.requests():
            for state in states:
                slot = not item.digest or item.digest in state.claimed()
                fits = state.limits is not None and state.limits.can_hold(item.max_rank, item.modules)
                assert not (state.free_seats and (slot or (state.free_slots and fits)))
