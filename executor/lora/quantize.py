"""FP8 slots: each A and B is stored as FP8 values and one float32 scale.

The scales of A and B are not kept: both go into the module's own, which is applied to h between the two
products, scale * (s_a A x) (s_b B) = (scale s_a s_b) (A x) B. So kernels see an adapter like any other. FP8
is floating: one scale a factor serves values over 15 binary orders at full precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = npt.NDArray[Any]
_DTYPES: Mapping[np.dtype[Any], torch.dtype] = {
    np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): torch.float8_e5m2,
}
FP8_DTYPES = tuple(_DTYPES.values())
_LEAST = float(np.finfo(np.float32).smallest_normal)


@dataclass(frozen=True, slots=True)
class Quantized:
    """`scale`: a float32 value. `error`: |values * scale - source| / |source|, in Frobenius norms."""

    scale: float
    error: float


def quantize_into(targets: Sequence[_Array], sources: Sequence[_Array]) -> Quantized:
    """Each source into its target, of FP8, all with one scale: that of the largest value. Sources that are
    not finite give a scale that is not."""
    dtype = _DTYPES[targets[0].dtype]
    wide = [torch.from_numpy(np.array(source, np.float32)) for source in sources]
    scale = _scale([float(values.abs().max()) for values in wide if values.numel()], dtype)
    missed = total = 0.0
    for target, values in zip(targets, wide, strict=True):
        rounded = (values / scale).to(dtype)
        target.view(np.uint8)[...] = rounded.view(torch.uint8).numpy()
        missed += _squares(rounded.float().mul_(scale).sub_(values))
        total += _squares(values)
    return Quantized(scale, (missed / total) ** 0.5 if total > 0 else 0.0)


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(FP8 values, scale), to the bit as `quantize_into`."""
    scale = _scale([float(weight.abs().max())] if weight.numel() else [], dtype)
    return (weight.float() / scale).to(dtype), scale


def _scale(largest: Sequence[float], dtype: torch.dtype) -> float:
    """A float32 value; NaN if one of `largest` is."""
    most = float(np.max(largest, initial=0.0))
    # Not 0 itself, by which nothing can be divided: subnormal values become zeros.
    return float(np.float32(1 if most == 0 else max(most / torch.finfo(dtype).max, _LEAST)))


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
