"""The activations between an MLP's projections: silu or gelu(gate) * up, gpt-oss's form, relu(x)^2."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Of a gated MLP: what its gate goes through.
Activation = Literal["silu", "gelu_tanh"]


class SiluAndMul(nn.Module):
    """[..., 2 * n] -> [..., n]: silu(gate) * up; gate is the first half of the columns, up the second."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class GeluAndMul(nn.Module):
    """[..., 2 * n] -> [..., n]: gelu(gate) * up, with the tanh form of gelu; halves as SiluAndMul's."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


class Gelu(nn.Module):
    """[..., n] -> [..., n]: the tanh form of gelu, of projections without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class ClampedSwiGLU(nn.Module):
    """[..., 2 * n] -> [..., n]: (up + 1) * gate * sigmoid(alpha * gate), gate <= limit and |up| <= limit.

    gate is the first half of the columns, up the second.
    """

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class ReLUSquared(nn.Module):
    """[..., n] -> [..., n]: relu(x)^2, of projections without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()
