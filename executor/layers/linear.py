"""Linear layers, named by how tensor parallelism splits them. With one device each holds the whole matrix."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearBase(nn.Module):
    """y[row] = weight @ x[row] + bias.

    `weight` is [output_size, input_size], `bias` [output_size] or None. `output_sizes` are the widths of the
    parts that are stacked in the output, in order; they add up to output_size. A plain layer has one part.
    """

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_sizes = tuple(output_sizes)
        self.output_size = sum(output_sizes)
        self.weight = nn.Parameter(torch.empty(self.output_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.output_size), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """Whole on every device."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size, (output_size,), bias)


class ColumnParallelLinear(LinearBase):
    """Split by output columns."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size, (output_size,), bias)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers over one input, stacked: gate and up as gate_up."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool = False) -> None:
        super().__init__(input_size, output_sizes, bias)


class QKVParallelLinear(LinearBase):
    """q, k and v stacked: `num_heads` query heads, then `num_kv_heads` key heads and as many value heads."""

    def __init__(
        self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int, bias: bool = False
    ) -> None:
        output_sizes = (num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size)
        super().__init__(hidden_size, output_sizes, bias)
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads


class RowParallelLinear(LinearBase):
    """Split by input columns; the parts' outputs are summed."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size, (output_size,), bias)
