import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor.batch.slots import Assigned, SlotState, SlotTable


def resident(table: SlotTable, digest: str) -> int:
    assigned = table.assign(digest)
    assert assigned is not None
    table.loaded(assigned[0])
    return assigned[0]


def test_a_new_adapter_loads_then_is_resident() -> None:
    table = SlotTable(2)
    assert table.assign("a") == Assigned(0, "")
    assert table.state(0) is SlotState.LOADING
    table.loaded(0)
    assert table.state(0) is SlotState.RESIDENT
    assert table.find("a") == 0
    assert table.find("b") is None


def use(table: SlotTable, digest: str) -> bool:
    """One sequence of this adapter, which ends at once. Says whether it took a page-in."""
    slot = table.find(digest)
    missed = slot is None
    if slot is None:
        slot = resident(table, digest)
    table.acquire(slot)
    table.release(slot)
    return missed


def test_of_equally_used_idle_slots_the_least_recently_used_is_reassigned() -> None:
    table = SlotTable(2)
    for digest in "ab":
        use(table, digest)
    b = table.find("b")
    use(table, "b"), use(table, "a")
    assert table.assign("c") == Assigned(b, "b")
    assert table.find("b") is None
    table.check()


def test_the_less_used_leaves_though_it_was_used_last() -> None:
    table = SlotTable(2)
    for digest in "aaab":
        use(table, digest)
    assert table.assign("c") == Assigned(1, "b")


def test_uses_before_an_adapter_had_its_slot_count() -> None:
    table = SlotTable(2)
    for digest in "aaabbc":  # "b" left for "c"
        use(table, digest)
    assert table.find("b") is None
    for digest in "bd":
        use(table, digest)
    assert table.digests.keys() == {"b", "d"}  # used three times like "a", and later


def test_what_somebody_waits_for_leaves_last() -> None:
    table = SlotTable(2)
    for digest in "aaab":
        use(table, digest)
    assert table.assign("c", awaited={"b", "c"}) == Assigned(0, "a")
    table.check()
    assert table.assign("d", awaited={"b", "c", "d"}) is not None
    table.check()


def test_slots_in_use_or_pinned_are_never_reassigned() -> None:
    table = SlotTable(2)
    a, b = resident(table, "a"), resident(table, "b")
    table.acquire(a)
    table.set_pinned(b, True)
    assert not table.has_place("c")
    assert table.assign("c") is None
    with pytest.raises(RuntimeError, match="users"):
        table.empty(a)
    table.set_pinned(b, False)
    assert table.assign("c") == Assigned(b, "b")


def test_emptied_slots_go_first_and_carry_no_pin() -> None:
    table = SlotTable(2)
    a = resident(table, "a")
    resident(table, "b")
    table.set_pinned(a, True)
    assert table.pinned == {"a"}
    assert table.empty(a) == "a"
    assert table.pinned == frozenset()
    assert table.assign("c") == Assigned(a, "")
    table.check()


def test_counts_never_go_below_zero() -> None:
    table = SlotTable(1)
    slot = resident(table, "a")
    with pytest.raises(RuntimeError, match="no users"):
        table.release(slot)


def test_heads_go_with_the_slot_of_who_used_them_least_recently() -> None:
    table = SlotTable(4, num_heads=2)
    for digest, heads in (("a", 1), ("b", 1), ("c", 0), ("d", 2)):
        table.set_heads(digest, heads)
    slots = [resident(table, digest) for digest in "abc"]
    assert table.assign("d") == Assigned(slots[0], "a", (slots[1],))  # though slot 3 is empty
    assert table.digests == {"c": slots[2], "d": slots[0]}
    table.acquire(slots[0])
    assert not table.has_place("a") and table.assign("a") is None
    assert table.assign("e") == Assigned(slots[1], "")
    table.check()


def test_more_heads_than_there_are_have_no_place() -> None:
    table = SlotTable(2, num_heads=1)
    table.set_heads("a", 2)
    assert not table.has_place("a")
    table.set_heads("a", 0)
    assert table.assign("a") == Assigned(0, "")


class HeadsMachine(RuleBasedStateMachine):
    """Adapters "0", "1", "2" need as many heads as their names say."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(3, num_heads=3)
        for heads in range(3):
            for suffix in "xy":
                self.table.set_heads(f"{heads}{suffix}", heads)

    @rule(heads=st.integers(0, 2), suffix=st.sampled_from("xy"))
    def assign(self, heads: int, suffix: str) -> None:
        table, digest = self.table, f"{heads}{suffix}"
        if table.find(digest) is not None:
            return
        before = table.digests
        users = {slot: table.users(slot) for slot in before.values()}
        assigned = table.assign(digest)
        assert (assigned is not None) == bool(table.digests.keys() - before.keys())
        gone = {before[digest] for digest in before.keys() - table.digests.keys()}
        assert not any(users[slot] for slot in gone)
        if assigned is not None:
            assert gone <= {assigned.slot, *assigned.emptied}
            table.loaded(assigned.slot)
        else:  # nobody idle could have helped
            idle = [d for d, slot in before.items() if not users[slot]]
            busy = sum(int(d[0]) for d, slot in before.items() if users[slot])
            assert (len(before) == 3 and not idle) or busy + heads > 3

    @rule(slot=st.integers(0, 2))
    def acquire(self, slot: int) -> None:
        if slot in self.table.digests.values():
            self.table.acquire(slot)

    @rule(slot=st.integers(0, 2))
    def release(self, slot: int) -> None:
        if self.table.users(slot):
            self.table.release(slot)

    @invariant()
    def heads_fit(self) -> None:
        self.table.check()
        assert sum(int(digest[0]) for digest in self.table.digests) <= 3


TestHeads = HeadsMachine.TestCase
TestHeads.settings = settings(max_examples=60, stateful_step_count=30)
