"""One step's description for the LoRA kernels: which rows belong to which slot.

Built from runs, `(slot, rows)` per sequence in row order, never by sorting tokens. Slot -1 means no adapter.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError

Run = tuple[int, int]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoRAMapping:
    """The runs of one step: all its rows, and the rows among them that reach the head (sampled or scored)."""

    index_mapping: tuple[Run, ...]
    prompt_mapping: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class LoRAGroup:
    """The rows of one slot: places [start, start + count) of the sorted order.

    `rows` selects the same rows, ascending: a slice when they are neighbours (no gather), else int64.
    """

    slot: int
    start: int
    count: int
    rows: slice | Tensor


@dataclass(slots=True)
class LoRAKernelMeta:
    """Fixed buffers, refilled once a step by `prepare_tensors`; views of one int32 buffer on the device.

    Running example, max_loras 4, runs [(2, 3), (-1, 1), (0, 2), (2, 1)], 7 rows:

        token_lora_mapping                [2, 2, 2, -1, 0, 0, 2, -1 ..]  int32 [max_num_tokens], then -1
        token_indices_sorted_by_lora_ids  [4, 5, 0, 1, 2, 6, 3, 0 ..]    int32 [max_num_tokens], base last
        lora_ids                          [0, 2, -1, -1]                 int32 [max_loras], active, then -1
        num_tokens_per_lora               [2, 4, 0, 0]                   int32 [max_loras], beside lora_ids
        lora_token_start_loc              [0, 2, 6, 6, 6]                int32 [max_loras + 1], half-open
        num_active_loras 2, num_rows 7, no_lora_flag_cpu False           host values

    Launches sized for max_loras skip the entries whose lora_id is -1, so a captured graph replays any step.
    """

    max_loras: int
    max_num_tokens: int
    token_lora_mapping: Tensor
    token_indices_sorted_by_lora_ids: Tensor
    num_tokens_per_lora: Tensor
    lora_token_start_loc: Tensor
    lora_ids: Tensor
    _device_buffer: Tensor
    _host_buffer: Tensor
    _host_views: list[npt.NDArray[np.int32]]
    num_rows: int = 0
    num_active_loras: int = 0
    no_lora_flag_cpu: bool = True
    groups: tuple[LoRAGroup, ...] = field(default=())

    @classmethod
    def make(cls, max_loras: int, max_num_tokens: int, device: torch.device | str) -> "LoRAKernelMeta":
        if max_loras < 1 or max_num_tokens < 1:
            raise ValueError(f"max_loras {max_loras} and max_num_tokens {max_num_tokens} must be at least 1")
        sizes = [max_num_tokens, max_num_tokens, max_loras, max_loras + 1, max_loras]
        host = torch.zeros(sum(sizes), dtype=torch.int32)
        # On the CPU the host buffer is the device buffer: nothing is copied.
        buffer = host.to(device)
        host_views = [part.numpy() for part in _parts(host, sizes)]
        mapping, indices, per_lora, starts, ids = _parts(buffer, sizes)
        meta = cls(
            max_loras, max_num_tokens, mapping, indices, per_lora, starts, ids, buffer, host, host_views
        )
        meta.prepare_tensors(())
        return meta

    def prepare_tensors(self, runs: Iterable[Run]) -> None:
        """Describe a step anew; nothing of the last one stays. One host-to-device copy, no sync back.

        Raises KernelArgumentError, with the last step's description untouched, for a slot outside
        [-1, max_loras), a negative count, or more rows than `max_num_tokens`.
        """
        slots, counts = self._checked(runs)
        rows = int(counts.sum())
        mapping, indices, per_lora, starts, ids = self._host_views
        mapping[:rows] = np.repeat(slots, counts)
        mapping[rows:] = -1
        indices[:rows] = _sorted_rows(slots, counts, rows)
        indices[rows:] = 0
        totals = np.bincount(slots[slots >= 0], weights=counts[slots >= 0], minlength=self.max_loras)
        active = np.flatnonzero(totals)
        per_lora[:] = 0
        per_lora[: active.size] = totals[active]
        starts[0] = 0
        np.cumsum(per_lora, out=starts[1:])
        ids[:] = -1
        ids[: active.size] = active
        self.num_rows, self.num_active_loras = rows, active.size
        self.no_lora_flag_cpu = active.size == 0
        self.groups = tuple(_groups(indices, active.tolist(), per_lora.tolist()))
        if self._device_buffer is not self._host_buffer:
            # From pageable memory: it has been read when this returns, so the next step may refill it.
            self._device_buffer.copy_(self._host_buffer)

    def _checked(self, runs: Iterable[Run]) -> tuple[_Ints, _Ints]:
        pairs = np.fromiter(chain.from_iterable(runs), dtype=np.int64).reshape(-1, 2)
        slots, counts = pairs[:, 0], pairs[:, 1]
        if pairs.size:
            if slots.min() < -1 or slots.max() >= self.max_loras:
                raise KernelArgumentError("runs", f"name a slot outside [-1, {self.max_loras})")
            if counts.min() < 0:
                raise KernelArgumentError("runs", "hold a negative number of rows")
        if counts.sum() > self.max_num_tokens:
            raise KernelArgumentError("runs", f"hold {counts.sum()} rows, the buffers {self.max_num_tokens}")
        return slots, counts


def _parts(buffer: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = accumulate(sizes)
    return [buffer[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _sorted_rows(slots: _Ints, counts: _Ints, rows: int) -> _Ints:
    """Row numbers by ascending slot, base rows last, otherwise in row order. Sorts runs, not rows."""
    # As unsigned, -1 is the largest value.
    order = np.argsort(slots.astype(np.uint64), kind="stable")
    row_starts = np.cumsum(counts) - counts
    place_starts = np.cumsum(counts[order]) - counts[order]
    return np.repeat(row_starts[order] - place_starts, counts[order]) + np.arange(rows)


def _groups(indices: npt.NDArray[np.int32], slots: list[int], counts: list[int]) -> Iterable[LoRAGroup]:
    start = 0
    for slot, count in zip(slots, counts, strict=False):
        rows = indices[start : start + count]
        first, last = int(rows[0]), int(rows[-1])
        # Rows of a group ascend, so their span tells whether they are neighbours.
        neighbours = last - first + 1 == count
        yield LoRAGroup(
            slot,
            start,
            count,
            slice(first, last + 1) if neighbours else torch.from_numpy(rows.astype(np.int64)),
        )
        start += count
