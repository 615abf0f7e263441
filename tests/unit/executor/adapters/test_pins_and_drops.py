"""The pager: what is pinned, and what is dropped once nobody needs it."""

import threading

import pytest

from adapter_store import DataLoss, StoreUnavailable
from executor.adapters.residency import Tier
from executor.batch.batcher import PageIn
from executor.errors import HostMemoryFull
from tests.support.engines.pager_world import Make


def test_drop_frees_every_copy_when_the_last_user_is_gone(make: Make) -> None:
    world = make()
    world.pager.acquire("a")
    world.settle("a")
    slot, *_ = world.slots.assign("a") or pytest.fail("no slot")
    world.pager.page_in([PageIn(slot, "a", "")])
    world.pager.drop("a")
    assert "a" in world.pager.host and world.slots.find("a") == slot
    world.pager.release("a")
    assert "a" not in world.pager.host and world.slots.find("a") is None
    assert world.store.in_slots == {}


def test_a_drop_during_the_load_throws_the_load_away(make: Make) -> None:
    world = make()
    world.store.gates["a"] = threading.Event()
    world.pager.collect(["a"], 0.0)
    world.pager.drop("a")
    world.store.gates["a"].set()
    world.settle()
    assert "a" not in world.pager.host
    world.settle("a")
    assert "a" in world.pager.host


def test_a_drop_is_done_when_nothing_is_left_or_under_way(make: Make) -> None:
    world = make()
    world.pager.drop("cold", key=(1, 1))
    assert world.pager.take_dropped() == ((1, 1),)
    world.store.gates["a"] = threading.Event()
    world.pager.collect(["a"], 0.0)
    world.pager.drop("a", key=(1, 2))
    world.pager.drop("a", key=(2, 1))
    world.pager.collect([], 0.0)
    assert world.pager.take_dropped() == ()
    world.store.gates["a"].set()
    world.settle()
    assert world.pager.take_dropped() == ((1, 2), (2, 1))
    world.pager.acquire("b")
    world.settle("b")
    world.pager.drop("b", key=(1, 3))
    assert world.pager.take_dropped() == ()
    world.pager.release("b")
    assert world.pager.take_dropped() == ((1, 3),)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), DataLoss("damaged"), HostMemoryFull()])
def test_a_load_that_fails_ends_its_drop(make: Make, error: Exception) -> None:
    world = make()
    world.store.gates["a"], world.store.errors["a"] = threading.Event(), error
    world.pager.collect(["a"], 0.0)
    world.pager.drop("a", key=(1, 1))
    world.store.gates["a"].set()
    world.settle()
    assert world.pager.take_dropped() == ((1, 1),)
    world.store.errors.clear()
    world.now += 100
    world.settle("a")
    assert "a" in world.pager.host, "a drop that is done takes nothing that comes later"


def test_a_drop_ends_hints(make: Make) -> None:
    """One that waited for an idle thread brought a copy of what was told to be free."""
    world = make()
    for digest in ("x", "y"):  # as many as there are threads
        world.store.gates[digest] = threading.Event()
    world.pager.collect(["x", "y"], 0.0)
    world.pager.prefetch("a", 0.0)
    world.pager.collect([], 0.0)
    world.pager.drop("a", key=(1, 1))
    for gate in world.store.gates.values():
        gate.set()
    world.settle()
    assert "a" not in world.store.asked and world.pager.take_dropped() == ((1, 1),)


def test_a_drop_waits_for_the_disk_and_for_no_other_adapters_pin(make: Make) -> None:
    discarded: list[str] = []
    world = make(discard_copy=discarded.append)
    world.pager.pin("a", Tier.HOST, "zoo/y")
    world.settle()
    world.pager.drop("a", "acme/x", key=(1, 1))
    assert world.pager.take_dropped() == ((1, 1),) and discarded == [], "it is kept for zoo/y"
    world.pager.drop("a", "zoo/y", key=(1, 2))
    assert discarded == ["a"] and world.pager.take_dropped() == ()
    world.pager.discarded("a")
    assert world.pager.take_dropped() == ((1, 2),)


def test_pins_load_and_stay(make: Make) -> None:
    world = make(room=3, slots=2)
    world.pager.pin("a", Tier.SLOT)
    world.settle()
    assert world.slots.pinned == {"a"}
    assert world.paged_in == ["a"]
    world.pager.pin("b", Tier.HOST)
    world.settle("c", "d", "e")
    assert "b" in world.pager.host
    assert world.pager.free_slots() == 1
    world.pager.unpin("a")
    assert world.slots.pinned == frozenset()


def test_each_adapter_with_that_content_has_a_pin_of_its_own(make: Make) -> None:
    world = make(room=3, slots=2)
    world.pager.pin("a", Tier.HOST, "acme/x")
    world.pager.pin("a", Tier.SLOT, "zoo/y")
    world.settle()
    assert world.slots.pinned == {"a"}
    world.pager.unpin("a", "zoo/y")
    assert world.slots.pinned == frozenset()
    world.pager.drop("a", "zoo/y")
    world.settle("b", "c", "d")
    assert "a" in world.pager.host  # for acme/x
    world.pager.drop("a", "acme/x")
    assert not world.pager.holds("a")
    for adapter in ("acme/x", "zoo/y"):
        world.pager.pin("a", Tier.HOST, adapter)
    world.settle()
    world.pager.drop("a")
    assert not world.pager.holds("a")


def test_pins_never_take_the_last_slot_or_the_last_room(make: Make) -> None:
    world = make(room=3, slots=2)
    world.pager.pin("a", Tier.SLOT)
    world.pager.pin("b", Tier.SLOT)
    world.pager.pin("c", Tier.HOST)
    world.settle()
    assert world.slots.pinned == {"a"}
    pinned = {copy.digest for copy in world.copies() if copy.pinned}
    assert pinned == {"a", "b"}
    assert world.settle("x") == [] and "x" in world.pager.host


def test_pins_take_no_full_heads(make: Make) -> None:
    world = make()
    world.store.heads["a"] = 1
    world.pager.pin("a", Tier.SLOT)
    world.settle()
    assert world.slots.pinned == frozenset() and world.paged_in == []
    assert {(copy.digest, copy.tier) for copy in world.copies() if copy.pinned} == {("a", Tier.HOST)}
