import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """[rows, 2 * n] -> [rows, n]: silu(gate) * up; gate is the first half of the columns, up the second."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
