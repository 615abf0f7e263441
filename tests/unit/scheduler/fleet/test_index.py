"""Executors join and leave the index: positions are used again, and nothing of who left stays in any mask."""

import pytest

from scheduler.fleet.index import FleetIndex
from scheduler.fleet.needs import Needs
from scheduler.fleet.residency import Tier
from scheduler.fleet.state import ExecutorState
from tests.support.services.planning import Fleet, executor, queue_of, request


def test_who_joins_takes_the_lowest_vacant_position() -> None:
    index = FleetIndex([executor(f"e:{n}") for n in range(3)])
    assert (index.everyone, index.membership) == (0b111, 3)
    index.leave(1)
    index.check()
    assert (index.everyone, index.positions(["e:0", "e:1", "e:2"])) == (0b101, 0b101)
    assert [index.join(executor(f"f:{n}")) for n in range(2)] == [1, 3]
    assert (index.everyone, index.membership) == (0b1111, 6)
    index.check()


def test_nothing_of_who_left_stays() -> None:
    """Whatever it held."""
    stays, leaves = executor("a:1", seats=9), executor("b:1", seats=9, rank=64, length=9999, x=Tier.SLOT)
    index = FleetIndex([stays, leaves], reserve_seats=1)
    leaves.sent("1", "x", 0.0, "tenant")
    big = Needs(max_rank=64)
    assert index.holders(big) == index.claims("x") == index.settled("tenant") == 0b10
    index.leave(1)
    index.check()
    assert not index.holders(big) | index.claims("x") | index.settled("tenant") | index.unknown
    assert index.open == index.serving == index.seated == index.shared == index.slotted == 0b01
    assert index.closest(0b11, "x") == 0b11
    assert index.longest == 1024
    leaves.ended("1")  # It tells the index no more.
    index.check()


def test_an_empty_fleet_may_run_anything_and_grows_from_nothing() -> None:
    index = FleetIndex([])
    assert index.may_ever_run(Needs(max_rank=999))
    index.join(executor("a:1"))
    assert not index.may_ever_run(Needs(max_rank=999))
    index.leave(0)
    assert index.may_ever_run(Needs(max_rank=999))
    index.check()


def test_a_name_is_a_member_once_and_a_vacant_position_is_nobodys_to_leave() -> None:
    index = FleetIndex([ExecutorState("10.0.0.1:1", name="pod-0")])
    with pytest.raises(ValueError, match="pod-0"):
        index.join(ExecutorState("10.0.0.2:1", name="pod-0"))
    index.leave(0)
    with pytest.raises(ValueError, match="position 0"):
        index.leave(0)


def test_what_waited_in_the_line_of_who_left_waits_at_nobody_who_has_its_position() -> None:
    full, late = executor("a:1", slots=1, seats=2), executor("b:1", slots=1, seats=2)
    fleet = Fleet(queue_of(request(1, "x")), full, aging_s=0.5)
    fleet.plan()
    fleet.queue.add(request(2, "y"))
    fleet.plan()
    [told] = fleet.policy.tend(1.0)
    assert (told.address, told.digest) == ("a:1", "y") and fleet.policy.cold.lined == 0b1
    fleet.leave("a:1")
    fleet.states["b:1"] = late
    assert fleet.index.join(late) == 0
    fleet.queue.put_back(request(1, "x"), 0.0)
    assert [placement.address for placement in fleet.plan(1.0)] == ["b:1"]
    assert fleet.policy.cold.lined == 0 and fleet.policy.cold.num_overdue == 0
