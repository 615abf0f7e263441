"""One layer's factors: what each output of a slot's rows is multiplied with."""

from collections.abc import Set

import torch
from torch import Tensor

from kernels.meta import LoRAKernelMeta

_CHUNK_ROWS = 1024  # bounds the float32 copies of y


class OutputFactors:
    """`table` float32 [max_loras + 1, outputs], its last row 1, as are all outputs without a factor; `slots`:
    those whose adapters have factors in any layer, kept up to date by whoever fills the table."""

    def __init__(self, table: Tensor, slots: Set[int]) -> None:
        self._table = table
        self._slots = slots

    def concern(self, meta: LoRAKernelMeta) -> bool:
        """Whether the step has rows of such a slot. All other steps cost nothing."""
        return bool(self._slots) and not self._slots.isdisjoint(meta.active_slots)

    def apply(self, y: Tensor, meta: LoRAKernelMeta, bias: Tensor | None) -> None:
        """Semantics: y[row] = factors[slot of row] * (y[row] - bias) + bias, in float32, rounded once.

        y     [rows of `meta`, outputs], changed in place; outputs whose factor is 1 are untouched
        bias  [outputs] or None for 0
        """
        if not self.concern(meta):
            return
        for start in range(0, len(y), _CHUNK_ROWS):
            part = y[start : start + _CHUNK_ROWS]
            # Slot -1 is the table's last row.
            slots = meta.token_lora_mapping[start : start + len(part)]
            part.copy_(_scaled(part.float(), self._table[slots], bias))


def _scaled(rows: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return rows * factors
    return torch.where(factors == 1, rows, torch.addcmul(bias.float(), rows - bias, factors))
