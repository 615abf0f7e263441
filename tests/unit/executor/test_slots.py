import pytest

from executor.slots import Assigned, SlotState, SlotTable


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


def test_the_least_recently_used_idle_slot_is_reassigned() -> None:
    table = SlotTable(2)
    a, b = resident(table, "a"), resident(table, "b")
    table.acquire(a)
    table.release(a)
    assert table.assign("c") == Assigned(b, "b")
    assert table.find("b") is None
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
