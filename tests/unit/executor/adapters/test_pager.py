"""The pager: what is loaded and kept, what hints may do, and which copies are told."""

import threading
import time
from random import Random

import pytest

from adapter_store import AdapterNotFound, StoreUnavailable
from executor.adapters.pager import MAX_HINTS
from executor.adapters.residency import Copy, Residency, Tier
from executor.batch.batcher import PageIn
from tests.support.engines.pager_world import Make
from tests.support.services.cluster import wait_until


def test_a_wanted_adapter_is_loaded_once(make: Make) -> None:
    world = make()
    world.store.gates["a"] = threading.Event()
    for _ in range(5):
        world.pager.collect(["a"], 0.0)
    world.store.gates["a"].set()
    assert world.settle("a") == []
    assert world.store.asked == ["a"]
    assert "a" in world.pager.host


def test_host_memory_stays_in_its_bound_and_keeps_the_longest_waiting(make: Make) -> None:
    world = make(room=3)
    world.settle("a", "b", "c", "d", "e")
    assert sorted(world.pager.host) == ["a", "b", "c"]
    world.settle("d", "b", "c")
    assert sorted(world.pager.host) == ["b", "c", "d"]
    assert world.pager.host.num_bytes == 30


def test_hints_push_out_nothing_that_is_needed(make: Make) -> None:
    world = make(room=2)
    world.settle("a", "b")
    world.pager.prefetch("c", world.now)
    world.settle("a", "b")
    assert sorted(world.pager.host) == ["a", "b"]
    world.pager.prefetch("c", world.now)
    world.settle("a")
    assert sorted(world.pager.host) == ["a", "c"]


def test_hints_are_loaded_soonest_first_and_behind_who_waits(make: Make) -> None:
    world = make(room=9)
    world.store.gates |= {digest: threading.Event() for digest in ("a", "b", "soon")}
    for digest, need_by in (("late", 9.0), ("soon", 3.0), ("over", 1.0), ("late", 5.0)):
        world.pager.prefetch(digest, need_by)

    def asked(*digests: str) -> None:
        def all_of_them() -> bool:
            world.pager.collect(["a", "b"], 2.0)
            return len(world.store.asked) >= len(digests)

        wait_until(all_of_them, f"{digests} are asked for")
        for _ in range(50):  # and no more
            world.pager.collect(["a", "b"], 2.0)
            time.sleep(0.001)
        assert sorted(world.store.asked) == sorted(digests)

    asked("a", "b")
    world.pager.prefetch("over", -20.0)  # nobody came for it
    world.store.gates["a"].set()
    asked("a", "b", "soon")
    for gate in ("b", "soon"):
        world.store.gates[gate].set()
    world.settle("a", "b")
    assert sorted(world.store.asked) == ["a", "b", "late", "soon"]


def test_nobody_waits_behind_hints(make: Make) -> None:
    world = make(room=3)
    hints = [f"h{number}" for number in range(5)]
    world.store.gates |= {hint: threading.Event() for hint in hints}
    for hint in hints:
        world.pager.prefetch(hint, 0.0)
    world.pager.collect([], 0.0)
    wait_until(lambda: len(world.store.asked) == 2, "both threads are busy")
    world.pager.acquire("a")
    world.pager.collect(["a"], 1.0)
    for hint in hints:
        world.store.gates[hint].set()
    world.now = 5.5  # more than the load timeout since the hints came
    assert world.settle("a") == []
    assert world.store.asked.index("a") == 2  # there are two threads
    assert sorted(world.store.asked[3:]) == hints[2:]  # which may be at work on two at once


def test_of_hints_that_are_due_the_one_for_most_requests_comes_first(make: Make) -> None:
    world = make(room=9)
    world.now = 5.0
    for digest, need_by, uses in (("few", 1.0, 1), ("many", 4.0, 9), ("later", 6.0, 99)):
        world.pager.prefetch(digest, need_by, uses)
    world.store.gates |= {digest: threading.Event() for digest in ("few", "many")}
    world.pager.collect([], world.now)
    world.store.gates["many"].set()
    wait_until(lambda: len(world.store.asked) == 2, "two threads are busy")
    world.store.gates["few"].set()
    world.settle()
    assert sorted(world.store.asked[:2]) == ["few", "many"] and world.store.asked[2] == "later"


def test_what_many_are_expected_to_use_stays_until_they_came(make: Make) -> None:
    """Of those that nobody waits for here. What few are expected to use stays no longer than others."""
    world = make(room=3, slots=9)
    world.settle("a", "b")
    for slot, digest in enumerate("aabbaabb"):
        world.pager.page_in([PageIn(slot, digest, "")])
    world.pager.prefetch("many", 0.0, 30)
    world.settle()
    world.settle("c")  # Was used less than any other.
    assert sorted(world.pager.host) == ["b", "c", "many"]
    world.pager.page_in([PageIn(8, "many", "")])
    world.settle("c", "d")
    assert sorted(world.pager.host) == ["b", "c", "d"]
    world.pager.prefetch("few", 0.0, 1)
    world.settle("d")
    world.settle("d", "e")
    assert sorted(world.pager.host) == ["b", "d", "e"]


def test_who_does_not_come_for_an_expected_one_keeps_it_for_a_while_only(make: Make) -> None:
    world = make(room=2, slots=2)
    world.settle("a")
    for _ in range(4):
        world.pager.page_in([PageIn(0, "a", "")])
    world.pager.prefetch("many", 0.0, 30)
    world.settle()
    world.now = 11.0
    world.settle("b")
    assert sorted(world.pager.host) == ["a", "b"]


def test_hints_are_bounded(make: Make) -> None:
    world = make()
    for number in range(10 * MAX_HINTS):
        world.pager.prefetch(f"h{number}", 0.0)
    world.settle()
    assert sorted(world.store.asked) == [f"h{number}" for number in range(9 * MAX_HINTS, 10 * MAX_HINTS)]


def test_a_final_failure_is_told_once_and_forgotten(make: Make) -> None:
    world = make()
    world.store.errors["a"] = AdapterNotFound("there is no a")
    world.pager.acquire("a")
    failures = world.settle("a")
    assert [(f.digest, f.rejection.reason) for f in failures] == [("a", "ADAPTER_NOT_FOUND")]
    world.pager.release("a")
    del world.store.errors["a"]
    assert world.settle("a") == []
    assert "a" in world.pager.host


def test_pauses_after_retryable_failures_grow(make: Make) -> None:
    world = make()
    world.store.errors["a"] = StoreUnavailable("away")
    world.pager.acquire("a")
    for start, pause in ((0.0, 0.5), (10.0, 1.0), (20.0, 2.0)):
        world.now = start
        asked = len(world.store.asked)
        assert world.settle("a")[0].rejection.retryable
        world.now = start + pause - 0.1
        assert world.settle("a")[0].rejection.reason == "STORE_UNAVAILABLE"
        assert len(world.store.asked) == asked + 1
    world.store.errors.clear()
    world.now = 30.0
    assert world.settle("a") == []


def test_a_hanging_load_ends_its_waiters_and_may_still_arrive(make: Make) -> None:
    world = make()
    world.store.gates["a"] = threading.Event()
    world.pager.acquire("a")
    assert world.pager.collect(["a"], 0.0) == []
    failures = world.pager.collect(["a"], 6.0)
    assert [f.rejection.reason for f in failures] == ["ADAPTER_LOAD_TIMEOUT"]
    assert failures[0].rejection.retryable
    world.store.gates["a"].set()
    world.now = 20.0
    world.settle("a")
    assert "a" in world.pager.host
    assert world.store.asked == ["a"]


def test_a_failing_load_that_nobody_waits_for_leaves_nothing(make: Make) -> None:
    world = make()
    world.store.errors["a"] = AdapterNotFound("there is no a")
    world.store.gates["a"] = threading.Event()
    world.pager.acquire("a")
    world.pager.collect(["a"], 0.0)
    world.pager.release("a")
    world.store.gates["a"].set()
    world.settle()
    assert world.pager.users() == {}
    assert world.pager.take_delta() is None


def test_slots_that_gave_their_heads_are_cleared(make: Make) -> None:
    world = make(heads=1)
    world.store.heads |= {"a": 1, "b": 1}
    for digest in ("a", "c", "b"):
        world.settle(digest)
        slot, evicted, emptied = world.slots.assign(digest) or pytest.fail("no slot")
        world.pager.page_in([PageIn(slot, digest, evicted, emptied)])
    assert world.store.in_slots[0].num_full_heads == 1  # b in the place of a, though c was older than b
    in_slots = {copy.digest: copy.num_bytes for copy in world.copies() if copy.tier is Tier.SLOT}
    assert in_slots == {"b": 110, "c": 10}  # who has no full head takes no room of one
    world.slots.set_heads("d", 1)
    world.slots.acquire(0)
    assert world.slots.assign("d") is None  # the only head is in use
    world.slots.release(0)
    world.slots.acquire(1)
    assert world.slots.assign("d") == (0, "b", ())


def test_full_heads_of_adapters_that_went_are_forgotten(make: Make) -> None:
    world = make(room=2, heads=1)
    names = [f"a{number}" for number in range(10)]
    world.store.heads |= dict.fromkeys(names, 1)
    for name in names:
        world.settle(name)
    assert [name for name in names if world.slots.needs_heads(name)] == names[-2:]


def test_copies_on_disk_are_reported_beside_all_others(make: Make) -> None:
    world = make()
    world.settle("a")
    disk = (Copy("a", Tier.DISK, 7), Copy("b", Tier.DISK, 7))
    world.pager.on_disk(disk)
    follower = Residency()
    first = world.pager.take_delta()
    assert first is not None
    follower.apply(first)
    assert {(copy.digest, copy.tier) for copy in follower.copies} == {
        ("a", Tier.DISK),
        ("b", Tier.DISK),
        ("a", Tier.HOST),
    }
    assert not world.pager.holds("b")
    world.pager.on_disk(disk[:1])
    second = world.pager.take_delta()
    assert second is not None and second.removed == disk[1:] and second.added == ()


def test_host_memory_must_hold_one_adapter(make: Make) -> None:
    with pytest.raises(ValueError, match="hold no adapter"):
        make(room=0)


def test_deltas_of_what_changed_add_up_to_all_copies(make: Make) -> None:
    """Whatever comes, goes, is pinned or dropped, in any order."""
    world, follower, rng = make(room=4, slots=3, heads=1), Residency(), Random(0)
    names = [f"a{number}" for number in range(8)]
    world.store.heads = {"a0": 1, "a1": 1}
    for _ in range(150):
        digest, act = rng.choice(names), rng.randrange(7)
        if act == 0:
            world.pager.pin(digest, rng.choice((Tier.HOST, Tier.SLOT)))
        elif act == 1:
            world.pager.unpin(digest)
        elif act == 2:
            world.pager.drop(digest)
        elif act == 3:
            sizes = [(name, rng.randrange(1, 3)) for name in rng.sample(names, 3)]
            world.pager.on_disk(tuple(Copy(name, Tier.DISK, size) for name, size in sizes))
        elif act == 4 and digest in world.pager.host and world.slots.find(digest) is None:
            assigned = world.slots.assign(digest)
            if assigned:
                world.pager.page_in([PageIn(assigned.slot, digest, assigned.evicted, assigned.emptied)])
        else:
            world.settle(digest)
        if rng.random() < 0.7 and (delta := world.pager.take_delta()) is not None:
            follower.apply(delta)
            assert _by_tier(follower.copies, Tier.HOST).keys() == set(world.pager.host)
            in_slots = _by_tier(follower.copies, Tier.SLOT)
            assert {name: copy.slot for name, copy in in_slots.items()} == world.slots.digests
            assert {name for name, copy in in_slots.items() if copy.pinned} == world.slots.pinned
    assert follower.number > 50


def _by_tier(copies: tuple[Copy, ...], tier: Tier) -> dict[str, Copy]:
    return {copy.digest: copy for copy in copies if copy.tier is tier}


def test_residency_followers_see_the_same_copies(make: Make) -> None:
    world, follower = make(), Residency()
    deltas = []
    for wanted in (["a"], ["b", "c"], ["d", "e"], ["a"]):
        world.settle(*wanted)
        delta = world.pager.take_delta()
        if delta is not None:
            deltas.append(delta)
            follower.apply(delta)
    assert len(deltas) >= 3
    assert {copy.digest for copy in follower.copies} == set(world.pager.host)
    with pytest.raises(ValueError, match="does not follow"):
        follower.apply(deltas[-1])
