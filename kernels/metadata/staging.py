"""One int32 device buffer that the host refills once a step with one copy."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.metadata.pinned_copy import PinnedCopy, load_driver


class Staging:
    """A device buffer and its host side. On the CPU both are the same memory.

    On a GPU two pinned buffers take turns, so the copy is asynchronous and the host never waits for the step
    that runs now, only (in `begin`) for the copy of the step before it.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        on_gpu = self.device_buffer.is_cuda
        self._copies = [PinnedCopy(self.device_buffer, load_driver()) for _ in range(2)] if on_gpu else []
        self.arrays: list[npt.NDArray[np.int32]] = (
            [copy.array for copy in self._copies] if on_gpu else [self.device_buffer.numpy()]
        )
        self._turn = 0

    def begin(self) -> int:
        """Which of `arrays` to fill now. What it holds is older than the last step, where there are two."""
        if self._copies:
            self._turn = 1 - self._turn
            self._copies[self._turn].wait()
        return self._turn

    def send(self, count: int | None = None) -> None:
        """Copy the first `count` elements, or all, to the device in the current stream's order."""
        if self._copies:
            self._copies[self._turn].send(len(self.device_buffer) if count is None else count)

    def part(self, start: int, size: int) -> Tensor:
        return self.device_buffer[start : start + size]
