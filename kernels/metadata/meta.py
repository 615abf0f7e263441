"""One step's description for the LoRA kernels: which rows belong to which slot, and how work is cut.

Built from runs, `(slot, rows)` per sequence in row order, never by sorting tokens. Slot -1 means no adapter.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.metadata import native
from kernels.metadata.host_fields import HostFields
from kernels.metadata.launch_plan import (
    MAX_SINGLE_ROWS,
    MAX_SLICES,
    ROWS_PER_ITEM,
    ROWS_PER_TILE,
    SPARE_ITEMS,
    LaunchPlan,
    most_pieces,
)
from kernels.metadata.native import Work
from kernels.metadata.staging import Staging
from kernels.metadata.work_list import Ints, Run, Runs, describe

# A rank hint for slots whose rank nobody told: it steers speed only.
_USUAL_RANK = 16


@dataclass(frozen=True, slots=True, eq=False)
class LoRAMapping:
    """The runs of one step: all its rows, and the rows among them that reach the head (sampled or scored).

    Pairs (slot, rows), or int32 [runs, 2] of them: an array costs the step less time.
    """

    index_mapping: tuple[Run, ...] | Ints
    prompt_mapping: tuple[Run, ...] | Ints

    def content(self) -> tuple[Hashable, Hashable]:
        """What both say now, whatever the caller changes later: equal contents are equal runs.

        Pairs and an array of the same runs differ.
        """
        return _content(self.index_mapping), _content(self.prompt_mapping)


def _content(runs: tuple[Run, ...] | Ints) -> Hashable:
    return (runs.shape, runs.dtype, runs.tobytes()) if isinstance(runs, np.ndarray) else tuple(runs)


@dataclass(frozen=True, slots=True)
class LoRAGroup:
    """The rows of one slot: places [start, start + count) of the sorted order.

    `rows` selects the same rows, ascending: a slice when they are neighbours (no gather), else int64.
    """

    slot: int
    start: int
    count: int
    rows: slice | Tensor


class LoRAKernelMeta:
    """Fixed buffers, refilled once a step by `prepare_tensors`; views of one int32 buffer on the device.

    Running example, max_loras 4, runs [(2, 3), (-1, 1), (0, 2), (2, 1)], 7 rows:

        token_lora_mapping                [2, 2, 2, -1, 0, 0, 2, -1 ..]  int32 [max_num_tokens], then -1
        token_indices_sorted_by_lora_ids  [4, 5, 0, 1, 2, 6, 3, 0 ..]    int32 [max_num_tokens], base last
        lora_ids                          [0, 2, -1, -1]                 int32 [max_loras], active, then -1
        num_tokens_per_lora               [2, 4, 0, 0]                   int32 [max_loras], beside lora_ids
        lora_token_start_loc              [0, 2, 6, 6, 6]                int32 [max_loras + 1], half-open
        items                             [[0, 0, 2, -1], [2, 2, 4, -1], [-1, 0, 0, 0] ..]
                                          int32 [n, 4]: slot, first place, rows, part (-1: all of it)
        tiles                             as items, up to 64 rows each; empty in small steps
        num_active_loras 2, num_rows 7, no_lora_flag_cpu False, plan     host values

    Programs beyond the lists' ends find slot -1 and do nothing, so a captured graph replays any step that
    was prepared with its plan. `slot_ranks` is the host's idea of each slot's highest rank: it steers speed
    (tile height, high ranks first), never the result. `finished_splits` counts inside a shrink launch and is
    zero between launches, so launches that share a meta must not overlap.
    """

    def __init__(self, max_loras: int, max_num_tokens: int, staging: Staging, first: int = 0) -> None:
        self.max_loras = max_loras
        self.max_num_tokens = max_num_tokens
        self.staging = staging
        sizes = field_sizes(max_loras, max_num_tokens)
        ends = list(accumulate(sizes, initial=first))
        self._hosts = [HostFields(array[first : ends[-1]], sizes) for array in staging.arrays]
        self._native = native.load() if staging.device_buffer.is_cuda else None
        parts = [staging.part(start, size) for start, size in zip(ends, sizes, strict=False)]
        self.items, self.tiles = parts[0].view(-1, 4), parts[1].view(-1, 4)
        self._max_items = len(self.items)
        self.num_tokens_per_lora, self.lora_token_start_loc, self.lora_ids = parts[2:5]
        self.token_lora_mapping, self.token_indices_sorted_by_lora_ids = parts[5:7]
        self.slot_ranks = np.full(max_loras, _USUAL_RANK, dtype=np.int32)
        self.finished_splits = torch.zeros(
            len(self.items) * MAX_SLICES, dtype=torch.int32, device=staging.device_buffer.device
        )
        # What the launchers have compiled for this meta, by what it was compiled for.
        self.launches: dict[Hashable, Any] = {}
        # And for which layers' weights: kernels/lora_linear.py.
        self.linears: dict[Hashable, Any] = {}
        self.num_rows = 0
        self._groups: tuple[LoRAGroup, ...] | None = None

    @classmethod
    def make(cls, max_loras: int, max_num_tokens: int, device: torch.device | str) -> "LoRAKernelMeta":
        (meta,) = make_metas(1, max_loras, max_num_tokens, device)
        return meta

    def prepare_tensors(self, runs: Runs, plan: LaunchPlan | None = None) -> None:
        """Describe a step anew; nothing of the last one stays. One host-to-device copy, no sync back.

        With a plan the work is cut to fit it, as the replay of a graph captured under it needs. Raises
        KernelArgumentError, with the last step's description untouched, for a slot outside [-1, max_loras),
        a negative count, more rows than `max_num_tokens`, or a plan that is too small for the step or too
        large for the buffers.
        """
        work = self.describe(runs, plan)
        self.fill(self.staging.begin(), work)
        self.staging.send()

    def describe(self, runs: Runs, plan: LaunchPlan | None = None) -> Work:
        """The step, checked and counted; changes nothing. Raises as `prepare_tensors` does."""
        if plan is not None and (plan.items > self._max_items or plan.tiles > len(self.tiles)):
            buffers = f"{self._max_items} items and {len(self.tiles)} tiles"
            raise KernelArgumentError("plan", f"{plan} is larger than the buffers, which hold {buffers}")
        sizes = self.max_loras, self.max_num_tokens, self._max_items
        if self._native is None:
            return describe(runs, *sizes, self.slot_ranks, plan)
        return native.describe(self._native, runs, *sizes, self.slot_ranks, plan)

    def fill(self, turn: int, work: Work) -> None:
        """Write a described step into a host buffer of a shared Staging, which the caller then sends."""
        self._fields = self._hosts[turn]
        work.write(self._fields)
        self.plan, self.num_rows, self.num_active_loras = work.plan, work.num_rows, work.num_active
        self.no_lora_flag_cpu = self.num_active_loras == 0
        self._work, self._groups = work, None

    def describes(self, work: Work) -> bool:
        """Whether `work` is what was written last."""
        return self._work is work

    @property
    def active_slots(self) -> list[int]:
        """The step's slots, ascending."""
        slots: list[int] = self._fields.ids[: self.num_active_loras].tolist()
        return slots

    @property
    def groups(self) -> tuple[LoRAGroup, ...]:
        """The step slot by slot, for operations that loop on the host. Made when first asked for."""
        if self._groups is None:
            self._groups = tuple(_groups(self._fields, self.num_active_loras))
        return self._groups


def make_metas(
    number: int, max_loras: int, max_num_tokens: int, device: torch.device | str
) -> list[LoRAKernelMeta]:
    """Metas over one Staging: filled together, they need one copy a step. All describe an empty step."""
    if max_loras < 1 or max_num_tokens < 1:
        raise ValueError(f"max_loras {max_loras} and max_num_tokens {max_num_tokens} must be at least 1")
    size = sum(field_sizes(max_loras, max_num_tokens))
    staging = Staging(number * size, device)
    metas = [LoRAKernelMeta(max_loras, max_num_tokens, staging, i * size) for i in range(number)]
    for meta in metas:
        meta.prepare_tensors(())
    return metas


def field_sizes(max_loras: int, max_num_tokens: int) -> list[int]:
    """Elements of items, tiles, num_tokens_per_lora, lora_token_start_loc, lora_ids, mapping, order; the
    first two start at multiples of 4, so an entry is one aligned 16-byte load."""
    single = min(max_num_tokens, MAX_SINGLE_ROWS)
    items = max(single, most_pieces(max_num_tokens, max_loras, ROWS_PER_ITEM)) + SPARE_ITEMS
    tiles = most_pieces(max_num_tokens, max_loras, ROWS_PER_TILE)
    used = [4 * items, 4 * tiles, max_loras, max_loras + 1, max_loras, max_num_tokens]
    padding = -(sum(used) + max_num_tokens) % 4
    return [*used, max_num_tokens + padding]


def _groups(fields: HostFields, active: int) -> Iterator[LoRAGroup]:
    starts, slots = fields.starts.tolist(), fields.ids.tolist()
    for slot, start, end in zip(slots[:active], starts[:active], starts[1 : active + 1], strict=True):
        rows = fields.order[start:end]
        first, last = int(rows[0]), int(rows[-1])
        # Rows of a group ascend, so their span tells whether they are neighbours.
        neighbours = last - first + 1 == len(rows)
        selected = slice(first, last + 1) if neighbours else torch.from_numpy(rows.astype(np.int64))
        yield LoRAGroup(slot, start, len(rows), selected)
