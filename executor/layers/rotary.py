"""Rotary position embedding and the published ways to stretch it.

The formulas are those of transformers' modeling_rope_utils.py: Llama 3.1's, and YaRN's (arXiv 2309.00071)
with the attention factor on cos and sin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """`attention_factor` multiplies cos and sin; `truncate` rounds the ends of the ramp to whole planes."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


class RotaryEmbedding(nn.Module):
    """positions [rows] -> (cos, sin), each [rows, 1, head_dim] in `dtype`: once a step, for all layers.

    Both are multiplied by `length`, and q and k so become longer by it: the scores of q k^T by its square.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None, length: float = 1.0) -> None:
        super().__init__()
        # Float32 whatever the model's dtype: bfloat16 cannot tell position 257 from 258.
        self.register_buffer("inv_freq", inverse_frequencies(head_dim, theta, scaling), persistent=False)
        self.length = length
        self.attention_factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        self.attention_factor *= length

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat((half, half), dim=-1)[:, None, :] for half in self.by_plane(positions))
        return cos.to(dtype), sin.to(dtype)

    def unturned(self, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """For layers without rotation: no angle, in the form of `rotation`, so that one kernel serves all."""
        cos, sin = rotation
        return torch.full_like(cos, self.length), torch.zeros_like(sin)

    def by_plane(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each float32 [rows, head_dim / 2]."""
        angles = positions.float()[:, None] * self.inv_freq
        if self.attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim], turned in the planes (i, i + head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each of the head_dim / 2 planes, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponents
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling():
            return _yarn(theta**exponents, head_dim, theta, scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, and those between are blended."""
    wavelength = 2 * math.pi / plain
    low, high, old = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    stretched = torch.where(wavelength > old / low, plain / scaling.factor, plain)
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = (wavelength >= old / high) & (wavelength <= old / low)
    return torch.where(between, blended, stretched)


def _yarn(waves: Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Planes below `low` are kept, planes above `high` stretched, with a linear ramp between."""

    def plane_turning(rotations: float) -> float:
        """The plane that turns `rotations` times within the original context."""
        return (head_dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    low, high = plane_turning(scaling.beta_fast), plane_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does: no division by zero
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (scaling.factor * waves)) * (1 - kept) + (1.0 / waves) * kept
