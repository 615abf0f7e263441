import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.lora.slot_marks import SlotMarks
from kernels.metadata.meta import LoRAKernelMeta

SLOTS, NUMBERS = 4, 3


def make() -> SlotMarks:
    return SlotMarks(SLOTS, NUMBERS, torch.device("cpu"))


def put(marks: SlotMarks, slot: int, number: int) -> int:
    """How many copies it takes."""
    copies = marks.put(slot, number)
    for target, source in copies:
        target.copy_(source)
    return len(copies)


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(-1, NUMBERS - 1)), max_size=30))
def test_host_and_device_know_the_same(puts: list[tuple[int, int]]) -> None:
    marks, known = make(), [-1] * (SLOTS + 1)
    for slot, number in puts:
        assert put(marks, slot, number) == (number >= 0 or known[slot] >= 0)
        known[slot] = number
        assert marks.on_device.tolist() == known  # the last one is slot -1's
        assert marks.slots == {slot for slot, number in enumerate(known) if number >= 0}


def test_steps_with_a_marked_slot() -> None:
    marks, meta = make(), LoRAKernelMeta.make(SLOTS, 8, "cpu")

    def concern(*slots: int) -> bool:
        meta.prepare_tensors([(slot, 1) for slot in slots])
        assert marks.among(slots) == marks.concern(meta)
        return marks.concern(meta)

    assert not concern(0, 1, 2, 3, -1)
    put(marks, 2, 0)
    assert concern(0, 2, -1) and not concern(0, 1, -1) and not concern(-1) and not concern()


def test_all_slots_for_a_while() -> None:
    marks, meta = make(), LoRAKernelMeta.make(SLOTS, 8, "cpu")
    with pytest.raises(RuntimeError, match="in between"), marks.as_if_all():
        assert marks.among([-1, 3]) and not marks.among([-1])
        meta.prepare_tensors([(-1, 2)])
        assert not marks.concern(meta)
        assert (marks.on_device == -1).all() and not marks.slots
        raise RuntimeError("in between")
    assert not marks.among([3])
