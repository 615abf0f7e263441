"""A step's tensors on the device, as parts of one buffer that the host refills with one copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.metadata.staging import Staging

# 256 bytes, as separate allocations would be: what a compiler assumes of an input's alignment stays true.
_ALIGNMENT = 64

Host = dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor: its shape, and whether its integers are int64 (`wide`) or int32."""

    shape: tuple[int, ...]
    wide: bool = False

    @property
    def words(self) -> int:
        """The int32 words that it takes, without padding."""
        return prod(self.shape) * (2 if self.wide else 1)


class StepBuffers:
    """Tensors by name that keep their addresses, as captured graphs need, and their sides on the host.

    A refill is `begin`, writing into the arrays that it returns, and `send`. On a GPU two pinned buffers take
    turns, so what an array holds after `begin` is older than the last step; on the CPU it is the tensor.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device | str) -> None:
        starts, end = {}, 0
        for name, field in fields.items():
            starts[name] = end
            end += -(-field.words // _ALIGNMENT) * _ALIGNMENT
        self._staging = Staging(end, device)
        self.tensors: dict[str, Tensor] = {}
        self._hosts: list[Host] = [{} for _ in self._staging.arrays]
        for name, field in fields.items():
            part = self._staging.part(starts[name], field.words)
            self.tensors[name] = (part.view(torch.int64) if field.wide else part).view(field.shape)
            for host, array in zip(self._hosts, self._staging.arrays, strict=True):
                words = array[starts[name] : starts[name] + field.words]
                host[name] = (words.view(np.int64) if field.wide else words).reshape(field.shape)

    def begin(self) -> Host:
        """The arrays to fill now, once the copy that read them last is done."""
        return self._hosts[self._staging.begin()]

    def send(self) -> None:
        """Copy what was filled to the device, in the current stream's order, without waiting for it."""
        self._staging.send()
