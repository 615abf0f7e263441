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


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each plane is stretched by a factor of its own; `attention_factor` multiplies cos and sin."""

    factors: tuple[float, ...]
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


class RotaryEmbedding(nn.Module):
    """positions [rows] -> (cos, sin), each [rows, 1, dims] in `dtype`: once a step, for all layers.

    `dims` of each head are turned, all of them without it, `interleaved` as in `apply_rotary`. cos and sin
    are multiplied by `length`, and q and k so become longer by it: the scores of q k^T by its square.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None,
        length: float = 1.0,
        *,
        dims: int | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        # Float32 whatever the model's dtype: bfloat16 cannot tell position 257 from 258.
        frequencies = inverse_frequencies(dims or head_dim, theta, scaling)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.head_dim, self.interleaved = head_dim, interleaved
        self.length = length
        self.attention_factor = length
        if isinstance(scaling, YarnScaling | LongRopeScaling):
            self.attention_factor *= scaling.attention_factor

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = (self._spread(plane)[:, None, :].to(dtype) for plane in self.by_plane(positions))
        return cos, sin

    def _spread(self, by_plane: Tensor) -> Tensor:
        """Both dimensions of a plane get its number."""
        if self.interleaved:
            return by_plane.repeat_interleave(2, dim=-1)
        return torch.cat((by_plane, by_plane), dim=-1)

    def unturned(self, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """For layers without rotation: no angle, in the form of `rotation`, so that one kernel serves all."""
        cos, sin = rotation
        return torch.full_like(cos, self.length), torch.zeros_like(sin)

    def by_plane(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each float32 [rows, dims / 2]."""
        angles = positions.float()[:, None] * self.inv_freq
        if self.attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [rows, heads, head_dim], of which the first cos.shape[-1] dimensions are turned, in the planes
    (i, i + dims / 2) or, `interleaved`, (2 * i, 2 * i + 1)."""
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :dims], cos, sin, interleaved), x[..., dims:]), dim=-1)
    if interleaved:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def inverse_frequencies(dims: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each of the dims / 2 planes, float32."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    plain = 1.0 / theta**exponents
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling():
            return _yarn(theta**exponents, dims, theta, scaling)
        case LongRopeScaling(factors):
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)


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
