"""The slots' memory: one tensor, one stripe a slot; every layer's stacked weights are views of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.lora.image import SlotImage
from executor.lora.layout import SlotLayout
from kernels.reference.slot_scatter import slot_scatter


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """One layer's views, a slice per served part.

    lora_a        slices [max_loras, max_rank, in]; fewer rows where they are dealt over ranks
    lora_b        slices [max_loras, max_rank, out], rank-major
    ranks         int32 [slices, max_loras], 0: the slot has no such module
    scales        float32 [slices, max_loras]
    shrink_ranks  as ranks, of the rows of lora_a: the same tensor unless they are dealt over ranks

    Rows at and beyond a slot's rank hold leftovers and are never read.
    """

    lora_a: tuple[Tensor, ...]
    lora_b: tuple[Tensor, ...]
    ranks: Tensor
    scales: Tensor
    shrink_ranks: Tensor


# What an adapter has beside its image: (target on the device, source).
TensorCopy = tuple[Tensor, Tensor]
Scatter = Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor], None]


def _scatter_on(device: torch.device) -> Scatter:
    if device.type == "cuda":
        from kernels.slot_scatter import slot_scatter as on_gpu  # needs triton

        return on_gpu
    return slot_scatter


class SlotArena:
    """[max_loras, slot_elements] storage with ranks and scales [slices, max_loras]; all slots start cleared.

    Not synchronised: the caller rewrites a slot only when no launched step can still read it.
    """

    def __init__(self, layout: SlotLayout, max_loras: int, device: torch.device | str) -> None:
        self.layout = layout
        self.max_loras = max_loras
        self.storage = torch.empty(max_loras, layout.slot_elements, dtype=layout.dtype, device=device)
        self.ranks = torch.zeros(len(layout.slices), max_loras, dtype=torch.int32, device=device)
        self.scales = torch.zeros(len(layout.slices), max_loras, dtype=torch.float32, device=device)
        dealt = any(part.cut.shards > 1 for part in layout.slices)
        self.shrink_ranks = torch.zeros_like(self.ranks) if dealt else self.ranks
        self._scatter = _scatter_on(self.storage.device)

    @property
    def nbytes_per_slot(self) -> int:
        """What a slot takes, and the most that an image can."""
        return self.layout.max_block_bytes

    def stacked(self, modules: Sequence[str]) -> StackedWeights:
        """Views for one layer's modules: ValueError unless neighbours in the layout, KeyError if unknown."""
        numbers = [self.layout.index[module] for module in modules]
        first = numbers[0]
        if numbers != list(range(first, first + len(numbers))):
            raise ValueError(f"modules {', '.join(modules)} are not neighbours in the slot layout")
        return StackedWeights(
            lora_a=tuple(self._view(n, "a") for n in numbers),
            lora_b=tuple(self._view(n, "b") for n in numbers),
            ranks=self.ranks[first : first + len(numbers)],
            scales=self.scales[first : first + len(numbers)],
            shrink_ranks=self.shrink_ranks[first : first + len(numbers)],
        )

    def load(self, slot: int, image: SlotImage) -> None:
        """Put a whole adapter into a slot; nothing of the former one stays visible.

        Raises ValueError for an image of another layout or a slot out of range, with the slot unchanged.
        """
        self.check(slot, image)
        self.enter(slot, image.block.to(self.storage.device))

    def check(self, slot: int, image: SlotImage) -> None:
        """Raises ValueError for an image of another layout or a slot out of range."""
        if image.slot_layout != self.layout.slot_layout:
            raise ValueError("the image was built for another slot layout")
        self._check_slot(slot)

    def enter(self, slot: int, block: Tensor) -> None:
        """Does what `load` does, from an image's block that is on the device; enqueued on the current
        stream."""
        self._scatter(self.storage[slot], self.ranks, self.shrink_ranks, self.scales, slot, block)

    def clear(self, slot: int) -> None:
        """Empty a slot: ranks become 0, which hides its stripe. Raises ValueError for a slot out of range."""
        self._check_slot(slot)
        self.ranks[:, slot] = 0
        self.shrink_ranks[:, slot] = 0
        self.scales[:, slot] = 0.0

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot {slot} is outside [0, {self.max_loras})")

    def _view(self, number: int, half: str) -> Tensor:
        part, place = self.layout.slices[number], self.layout.stripe[number]
        if half == "a":
            rows, width, offset = part.cut.a_rows(self.layout.max_rank), part.a_width, place.a_offset
        else:
            rows, width, offset = self.layout.max_rank, part.b_width, place.b_offset
        return self.storage.as_strided(
            (self.max_loras, rows, width), (self.layout.slot_elements, width, 1), offset
        )
