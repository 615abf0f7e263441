"""Which tokens a step's draws may bring: bit masks, written on the host and copied once a step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.metadata.staging import Staging

Words = npt.NDArray[np.uint32]

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Masks:
    """Of some of a step's draws; the others may bring any token.

    draws  their numbers
    rows   int32 [masks], the same on the device
    words  int32 [masks, ceil(vocab / 32)] on the device: bit v % 32 of word v // 32 is 1 where v may come
    """

    draws: tuple[int, ...]
    rows: Tensor
    words: Tensor


class MaskBuffers:
    """For up to `max_draws` masks a step. On a GPU two pinned buffers take turns, so that writing waits for
    the copy of the step before the last one at most."""

    def __init__(self, max_draws: int, vocab_size: int, device: torch.device | str) -> None:
        self.num_words = -(-vocab_size // WORD_BITS)
        self._max_draws = max_draws
        # Whole words of 16 bytes before the masks: a kernel is compiled for their alignment.
        self._first = -(-max_draws // 4) * 4
        self._staging = Staging(self._first + max_draws * self.num_words, device)
        self._turn = 0

    def begin(self) -> Words:
        """[max_draws, words] to write masks into, from the first row on. They hold what they held."""
        self._turn = self._staging.begin()
        words = self._staging.arrays[self._turn][self._first :].view(np.uint32)
        return words.reshape(self._max_draws, self.num_words)

    def send(self, draws: tuple[int, ...]) -> Masks:
        """Enqueue the copy of the masks of these draws, in the order of the rows that were written."""
        count = len(draws)
        self._staging.arrays[self._turn][:count] = draws
        self._staging.send(self._first + count * self.num_words)
        words = self._staging.part(self._first, count * self.num_words)
        return Masks(draws, self._staging.part(0, count), words.view(count, self.num_words))
