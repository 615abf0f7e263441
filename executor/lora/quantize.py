"""FP8 slots: a factor is stored as FP8 values and one float32 scale.

The scales of A and B are not kept: both go into the module's own, which is applied to h between the two
products, scale * (s_a A x) (s_b B) = (scale s_a s_b) (A x) B. So kernels see an adapter like any other. FP8
is floating: one scale a factor serves values over 15 binary orders at full precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = npt.NDArray[Any]
# The largest finite value.
_LARGEST = {np.dtype(ml_dtypes.float8_e4m3fn): 448.0, np.dtype(ml_dtypes.float8_e5m2): 57344.0}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Quantized:
    """`scale`: a float32 value. `error`: |values * scale - source| / |source|, in Frobenius norms."""

    scale: float
    error: float


def quantize_into(targets: Sequence[_Array], sources: Sequence[_Array]) -> Quantized:
    """Each source into its target, of FP8, all with one scale: that of the largest value. Sources that are
    not finite give a scale that is not."""
    wide = [np.asarray(source, np.float32) for source in sources]
    largest = float(np.max([np.abs(values).max() for values in wide if values.size] or [0.0]))
    scale = np.float32(1 if largest == 0 else largest / _LARGEST[targets[0].dtype])
    missed = total = 0.0
    for target, values in zip(targets, wide, strict=True):
        with np.errstate(all="ignore"):
            np.copyto(target, values / scale, casting="unsafe")
            missed += float(np.square(target.astype(np.float32) * scale - values, dtype=np.float64).sum())
        total += float(np.square(values, dtype=np.float64).sum())
    return Quantized(float(scale), (missed / total) ** 0.5 if total > 0 else 0.0)


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(FP8 values, scale), to the bit as `quantize_into`."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    scale = float(np.float32(1 if largest == 0 else largest / torch.finfo(dtype).max))
    return (weight.float() / scale).to(dtype), scale
