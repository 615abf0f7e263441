"""RMSNorm: x is scaled in float32, cast back, and multiplied by the weight; and its other forms."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.distributed import SINGLE, ParallelGroup

# rms: RMSNorm; offset_rms: OffsetRMSNorm; layer: LayerNorm; biased_layer: BiasedLayerNorm.
NormKind = Literal["rms", "offset_rms", "layer", "biased_layer"]


class Norm(nn.Module):
    """Over the last axis, which has as many elements as `weight`."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)


class RMSNorm(Norm):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; float32 up to the weight, then x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """(1 + weight) * x / sqrt(mean(x^2) + eps) over the last axis; float32 throughout, then x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(Norm):
    """weight * (x - mean) / sqrt(variance + eps) over the last axis; float32 throughout, then x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), None, self.eps).to(x.dtype)


class BiasedLayerNorm(Norm):
    """LayerNorm, plus a bias."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


class HeadsRMSNorm(RMSNorm):
    """[rows, own heads, head_dim], normed over all heads of all ranks together; `weight` is the own heads'.

    `own`: which of `num_heads` heads this rank has. Where there are fewer than ranks, several have the same.
    """

    def __init__(
        self, num_heads: int, head_dim: int, eps: float, own: range, group: ParallelGroup = SINGLE
    ) -> None:
        super().__init__(len(own) * head_dim, eps)
        self.whole_size = num_heads * head_dim
        self.own_range = range(own.start * head_dim, own.stop * head_dim)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(1).float()
        squares = self.group.all_reduce(wide.pow(2).sum(-1, keepdim=True))
        summed = len(self.own_range) * self.group.size  # a head counts as often as there are ranks with it
        scale = torch.rsqrt(squares / summed + self.eps)
        return (self.weight * (wide * scale).to(x.dtype)).view_as(x)


_NORMS: Mapping[NormKind, type[Norm]] = {
    "rms": RMSNorm,
    "offset_rms": OffsetRMSNorm,
    "layer": LayerNorm,
    "biased_layer": BiasedLayerNorm,
}


def make_norm(kind: NormKind, size: int, eps: float) -> Norm:
    return _NORMS[kind](size, eps)
