"""The activations between an MLP's projections: silu(gate) * up, gpt-oss's clamped form, relu(x)^2."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """[..., 2 * n] -> [..., n]: silu(gate) * up; gate is the first half of the columns, up the second."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


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
