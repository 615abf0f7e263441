"""Marks the slots whose adapters are more than low-rank pairs, for the host and for the device.

The host chooses a step's form by the marks; on the device a captured step finds them at every replay.
"""

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import torch

from executor.lora.arena import TensorCopy
from kernels.metadata.meta import LoRAKernelMeta


class SlotMarks:
    """A number of [0, numbers) for each slot that has such a thing, -1 for all others.

    `on_device` int32 [max_loras + 1]; the last entry stays -1: it is what slot -1 finds.
    """

    def __init__(self, max_loras: int, numbers: int, device: torch.device) -> None:
        self.on_device = torch.full((max_loras + 1,), -1, dtype=torch.int32, device=device)
        # Copied from there: no copy waits for the host, and none needs pinned memory.
        self._values = torch.arange(-1, numbers, dtype=torch.int32, device=device)
        self._numbers: dict[int, int] = {}
        self._all = False

    @property
    def slots(self) -> Set[int]:
        return self._numbers.keys()

    def put(self, slot: int, number: int) -> list[TensorCopy]:
        """The slot's number from now on, -1 for none: with the copies returned, which must be made before a
        step reads the slot. A slot that stays without one needs none."""
        if number < 0 and slot not in self._numbers:
            return []
        self._numbers.pop(slot, None)
        if number >= 0:
            self._numbers[slot] = number
        return [(self.on_device[slot], self._values[number + 1])]

    def among(self, slots: Iterable[int]) -> bool:
        """Whether one of them is marked."""
        if self._all:
            return any(slot >= 0 for slot in slots)
        return bool(self._numbers) and not self._numbers.keys().isdisjoint(slots)

    def concern(self, meta: LoRAKernelMeta) -> bool:
        """Whether the step has rows of a marked slot."""
        return (self._all or bool(self._numbers)) and self.among(meta.active_slots)

    @contextmanager
    def as_if_all(self) -> Iterator[None]:
        """Within it steps with adapters take the form of marked ones. What they compute stays the same: on
        the device no slot is marked by this."""
        self._all = True
        try:
            yield
        finally:
            self._all = False
