"""Scales of FP8 products, of the reference API's dense and expert operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launching.checks import check, check_same_device
from kernels.launching.fp8 import spread


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Scales of one product x @ w.T: each value counts as itself times its scale.

    weights  of each slice float32 [max_loras, experts, groups of outputs, groups of inputs], or none;
             dense weights have one expert
    rows     float32 [rows, groups of inputs], or [1, 1] for all of x
    group_n, group_k  outputs and inputs that share a scale, 0: all
    """

    weights: tuple[Tensor, ...] = ()
    rows: Tensor | None = None
    group_n: int = 0
    group_k: int = 0

    @property
    def group(self) -> tuple[int, int]:
        return self.group_n, self.group_k

    @property
    def by_inputs(self) -> bool:
        """Whether scales change along the inputs."""
        widths = [scales.shape[3] for scales in self.weights]
        return max([*widths, 1 if self.rows is None else self.rows.shape[1]]) > 1

    def weight(self, stack: Sequence[Tensor], s: int, slot: int, expert: int) -> Tensor:
        """float32 [outputs, inputs] of slice s, with its scales."""
        weight = stack[s][slot, expert].float()
        if not self.weights:
            return weight
        return weight * spread(self.weights[s][slot, expert], weight.shape, self.group)

    def row(self, x: Tensor, numbers: Tensor) -> Tensor:
        """float32 [numbers, inputs]: those rows of x, with their scales."""
        rows = x[numbers].float()
        if self.rows is None:
            return rows
        scales = self.rows if len(self.rows) == 1 else self.rows[numbers]
        group = 1, self.group_k if scales.shape[1] > 1 else 0
        return rows * spread(scales, (len(scales), rows.shape[1]), group)


UNSCALED = Scaling()


def row_scales(scales: Tensor, argument: str, rows: int, groups: int, device: torch.device) -> Tensor:
    """[rows, 1 or groups], or [1, 1] for one value. Raises KernelArgumentError."""
    whole = scales.view(1, 1) if scales.numel() == 1 else scales
    shapes = ((1, 1), (rows, 1), (rows, groups))
    fits = tuple(whole.shape) in shapes and scales.dtype == torch.float32
    check(fits, argument, f"must be float32, one value, [{rows}, 1] or [{rows}, {groups}]")
    check_same_device(device, **{argument: scales})
    return whole
