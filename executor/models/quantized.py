"""Quantized weights of checkpoints: which tensors make one weight, and the weight that they mean.

Weights are dequantized as they are loaded, in float32, and then cast to the model's dtype.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# E2M1 by its four bits: sign, two of exponent, one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MXFP4_BIAS = 127
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Scheme(Protocol):
    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """(name of the weight, tensor of its values, tensor of its scales), among a checkpoint's names."""
        ...

    def unused(self, name: str) -> bool:
        """A tensor that no weight is made of: it belongs to activations, which are not quantized here."""
        ...

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        """The weight, float32. ValueError, saying why, for tensors that are not of this scheme."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8:
    """weight[n, k] = values[n, k] * scale, which is one for the tensor, one a row [out, 1], or, with `block`
    = (block_n, block_k), scales[n // block_n, k // block_k]."""

    scale_name: str  # what stands in a name instead of "weight"
    block: tuple[int, int] | None = None

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        present = set(names)
        for name in present:
            scales = f"{name.removesuffix('weight')}{self.scale_name}"
            if name.endswith(".weight") and scales in present:
                yield name, name, scales

    def unused(self, name: str) -> bool:
        return name.endswith((".input_scale", ".activation_scale"))

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        if values.dtype not in _FP8_DTYPES or values.dim() != 2:
            raise ValueError(f"is {values.dtype} {list(values.shape)}, not a matrix of FP8")
        return values.float() * self._factors(values, scales.float())

    def _factors(self, values: Tensor, scales: Tensor) -> Tensor:
        height, width = values.shape
        if scales.numel() == 1:
            return scales.view(1, 1)
        if tuple(scales.shape) == (height, 1):
            return scales
        if self.block is not None:
            block_n, block_k = self.block
            if tuple(scales.shape) == (-(-height // block_n), -(-width // block_k)):
                wide = scales.repeat_interleave(block_n, 0)[:height]
                return wide.repeat_interleave(block_k, 1)[:, :width]
        raise ValueError(f"has scales {list(scales.shape)} for {[height, width]} in blocks of {self.block}")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss's experts: E2M1 values in blocks of 32, two in a byte (the low half first), times
    2^(scale - 127).

    values uint8 [experts, out, in / 32, 16], scales uint8 [experts, out, in / 32]; the weight is
    [experts, in, out], as in a checkpoint that is not quantized.
    """

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        present = set(names)
        for blocks in present:
            name = blocks.removesuffix("_blocks")
            if name != blocks and f"{name}_scales" in present:
                yield name, blocks, f"{name}_scales"

    def unused(self, name: str) -> bool:
        return False

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        bytes_ = values.dtype == scales.dtype == torch.uint8
        if not bytes_ or values.dim() != 4 or values.shape[:3] != scales.shape or values.shape[3] != 16:
            raise ValueError(f"is {values.dtype} {list(values.shape)} with scales {list(scales.shape)}")
        table = torch.tensor(_FP4, dtype=torch.float32, device=values.device)
        halves = torch.stack((values & 0x0F, values >> 4), dim=-1)  # [experts, out, blocks, 16, 2]
        exponents = scales.to(torch.int32) - _MXFP4_BIAS
        weight = torch.ldexp(table[halves.int()].flatten(3), exponents[..., None])
        return weight.flatten(2).transpose(1, 2)
