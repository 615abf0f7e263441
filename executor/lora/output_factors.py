"""One layer's factors: what each output of a slot's rows is multiplied with."""

import torch
from torch import Tensor

from kernels.meta import LoRAKernelMeta


class OutputFactors:
    """float32 [max_loras, outputs]; slots that were not set change nothing and cost nothing."""

    def __init__(self, max_loras: int, outputs: int, device: torch.device) -> None:
        self._table = torch.ones(max_loras, outputs, device=device)
        self._slots: set[int] = set()

    def set(self, slot: int, factors: Tensor) -> None:
        """`factors` [outputs]; 1 where the adapter has none."""
        self._table[slot].copy_(factors)
        self._slots.add(slot)

    def clear(self, slot: int) -> None:
        self._slots.discard(slot)

    def apply(self, y: Tensor, meta: LoRAKernelMeta, bias: Tensor | None) -> None:
        """Semantics: y[row] = factors[slot of row] * (y[row] - bias) + bias, in float32, rounded once.

        y     [rows of `meta`, outputs], changed in place; rows of other slots are untouched
        bias  [outputs] or None for 0
        """
        if meta.no_lora_flag_cpu or not self._slots:
            return
        for group in meta.groups:
            if group.slot in self._slots:
                rows = y[group.rows].float()
                rows = rows if bias is None else rows - bias
                rows = rows * self._table[group.slot]
                y[group.rows] = (rows if bias is None else rows + bias).to(y.dtype)
