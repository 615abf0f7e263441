"""RMSNorm: x is scaled in float32, cast back, and multiplied by the weight."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; float32 up to the weight, then x's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
