from dataclasses import replace

from scheduler.fleet.residency import Comings, Copy, Residency, Tier
from scheduler.fleet.state import ExecutorState, Limits, Phase, Report


def ready(free_seats: int = 4, free_slots: int = 2) -> ExecutorState:
    state = ExecutorState("host:1", phase=Phase.READY)
    state.limits = Limits(1024, 16, frozenset({"q_proj"}), max_loras=2, max_seats=4)
    state.reported(Report(free_seats=free_seats, free_slots=free_slots))
    return state


def test_what_was_sent_after_the_report_uses_room() -> None:
    state = ready()
    state.sent("1", "x")
    state.sent("2", "x")
    state.sent("3", "")
    assert (state.free_seats, state.busy_seats, state.free_slots) == (1, 3, 1)
    state.reported(Report(free_seats=2, free_slots=1, received=2))
    assert (state.free_seats, state.busy_seats, state.free_slots) == (1, 3, 1)
    state.check()


def test_an_end_is_no_room_before_the_next_report() -> None:
    state = ready(free_seats=1)
    state.sent("1", "x")
    assert state.ended("1")
    assert not state.ended("1")
    assert (state.free_seats, state.claims("x"), state.num_running) == (0, 0, 0)
    state.reported(Report(free_seats=1, free_slots=2, received=1))
    assert (state.free_seats, state.free_slots) == (1, 2)
    state.check()


def test_reset_returns_what_was_running_and_forgets_the_rest() -> None:
    state = ready()
    state.sent("1", "x")
    state.residency = Residency.from_snapshot(7, [Copy("x", Tier.SLOT, 0, 10, False)])
    assert state.reset() == ["1"]
    assert (state.num_running, state.free_seats, state.limits) == (0, 0, None)
    assert state.residency.tier("x") is Tier.NOWHERE
    state.check()


def test_limits() -> None:
    limits = Limits(1024, 16, frozenset({"q_proj"}), max_loras=2, max_seats=4)
    assert limits.can_hold(0, frozenset())
    assert limits.can_hold(16, frozenset({"q_proj"}))
    assert not limits.can_hold(17, frozenset({"q_proj"}))
    assert not limits.can_hold(8, frozenset({"q_proj", "lm_head"}))
    assert not limits.can_hold(8, frozenset({"q_proj"}), full_heads=1)
    assert replace(limits, max_full_heads=1).can_hold(8, frozenset({"q_proj"}), full_heads=1)


def test_residency_follows_deltas_and_sees_gaps() -> None:
    residency = Residency.from_snapshot(3, [Copy("x", Tier.HOST, 0, 10, False)])
    assert residency.apply(4, [Copy("x", Tier.SLOT, 1, 10, False)], [])
    assert residency.tier("x") is Tier.SLOT
    assert residency.in_slots() == ["x"]
    assert not residency.apply(6, [], [("x", Tier.SLOT)])
    assert residency.tier("x") is Tier.SLOT
    assert residency.apply(5, [Copy("y", Tier.DISK, 0, 10, False)], [("x", Tier.SLOT), ("x", Tier.HOST)])
    assert [(copy.digest, copy.tier) for copy in residency.copies()] == [("y", Tier.DISK)]
    residency.check()


def test_comings_and_goings_are_counted_from_the_snapshot_on() -> None:
    slot, host = (Copy("x", tier, 0, 10, False) for tier in (Tier.SLOT, Tier.HOST))
    residency = Residency.from_snapshot(0, [slot])
    assert residency.comings("x", Tier.SLOT) == Comings(1, 0)
    assert residency.apply(1, [Copy("x", Tier.SLOT, 0, 10, True), host], [])  # a pin is no coming
    assert residency.apply(2, [], [("x", Tier.SLOT)])
    assert residency.apply(3, [slot], [("x", Tier.HOST)])
    assert residency.comings("x", Tier.SLOT) == Comings(2, 1)
    assert residency.comings("x", Tier.HOST) == Comings(1, 1)
    assert residency.comings("y", Tier.HOST) == Comings()
    assert (residency.count(Tier.SLOT), residency.count(Tier.HOST)) == (1, 0)


def test_hits_and_page_ins_are_those_of_requests() -> None:
    state = ExecutorState("a:1")
    state.sent("1", "x", 10.0)
    state.sent("2", "x", 11.0)
    state.sent("3", "", 11.0)
    assert state.moved(1, [Copy("x", Tier.HOST, 0, 10, False)], [], 11.5)
    assert state.moved(2, [Copy("x", Tier.SLOT, 0, 10, False)], [], 12.5)
    assert list(state.usage.page_ins) == [2.5]  # since the first request that needed it
    state.sent("4", "x", 13.0)
    assert (state.usage.hits[Tier.NOWHERE], state.usage.hits[Tier.SLOT]) == (2, 1)
    assert sum(state.usage.hits) == 3
    assert state.moved(3, [Copy("y", Tier.SLOT, 1, 10, False)], [], 14.0)  # a pin: nobody waited
    assert len(state.usage.page_ins) == 1
    assert state.ended("4", 20.0) and state.last_use("x") == 20.0
    assert state.last_use("y") is None
    state.sent("5", "w", 15.0)
    assert state.ended("5", 16.0)  # cancelled while it waited for a slot
    state.sent("6", "w", 90.0)
    assert state.moved(4, [Copy("w", Tier.SLOT, 2, 10, False)], [], 91.0)
    assert list(state.usage.page_ins) == [2.5, 1.0]
    state.sent("7", "z", 121.0)
    state.reset()
    state.usage.paged_in("z", 199.0)  # after a break nobody knows since when
    assert len(state.usage.page_ins) == 2
