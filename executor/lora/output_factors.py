"""DoRA's factors of one layer: what each output of a slot's rows is multiplied with."""

from dataclasses import dataclass

from torch import Tensor

from executor.lora.slot_marks import SlotMarks


@dataclass(frozen=True, slots=True)
class OutputFactors:
    """`table` float32 [max_loras, outputs], with 1 for outputs without a factor. Only rows of slots that
    `marks` marks mean anything: their adapters have factors in any layer."""

    table: Tensor
    marks: SlotMarks
