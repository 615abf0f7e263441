import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """[..., 2 * n] -> [..., n]: silu(gate) * up; gate is the first half of the columns, up the second."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class InterleavedClampedSwiGLU(nn.Module):
    """[..., 2 * n] -> [..., n]: (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and |up| <= limit.

    gate is in the even columns, up in the odd ones.
    """

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate = x[..., ::2].clamp(max=self.limit)
        up = x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
