"""Which steps are captured, and how a step's LoRA work is cut to fit one of them. No GPU needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from executor.step.inputs import SequenceRows
from kernels.metadata.launch_plan import MAX_SINGLE_ROWS, ROWS_PER_ITEM, LaunchPlan, rank_classes
from kernels.metadata.work_list import typical_class

Runs = npt.NDArray[np.int32]

# Largest piecewise captured step, unless more are wished: beyond, the GPU takes longer than Python does to
# launch all kernels, where nothing else wants the interpreter. The warm-up counts on so many at least.
MOST_MIXED_ROWS = 512
# Entries of the graphs for few adapters, whose kernels have no programs for more. Up to 24 shrink runs beside
# the base products: 64 sequences on 16 adapters bring 8,410 tok/s, 7,670 with the graphs for any number; 8
# adapters 8,850 with 8 entries, 8,700 with 24 (H200, Llama-3.1-8B's shapes).
_FEW_ITEMS = (8, 24)
# Slots that a step's adapters are first taken to be on: where there are more, a step on few of them launches
# what it would with so many. Then twice as many, and so on: 256 rows on 64 adapters need 64 entries, and for
# any 512 slots there would be 256.
_USUAL_SLOTS = 64
# Height of a rank tile that graphs are captured for: LoRA's usual rank; higher ranks loop. Where slots hold
# those, shared entries have graphs for them, too: 64 sequences on 1 and 8 adapters of rank 64 bring 8,130 and
# 7,720 tok/s, 7,690 and 7,210 with tiles of 16. Adapters of rank 16 would lose 1 and 1.5 % by such tiles, and
# row by row, where those gain nothing, 13 % (H200, Llama-3.1-8B's shapes).
_USUAL_TILE = 16


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Rows of the captured steps, ascending: `decode`, one row a sequence, and `mixed`, any rows."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def up_to(cls, max_sequences: int, max_rows: int, most_mixed: int = MOST_MIXED_ROWS) -> "GraphSizes":
        """1, 2, 4, 8, then steps of 8, 16 and 32: a filled-up row costs nearly nothing, until it takes the
        products to another tile height. Mixed ones in steps of 64 to 384, of 128 beyond: 448 rows take
        19 ms with an 8B model on an H200, 384 and 512 take 14 and 16."""
        steps = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 513, 32))
        decode = (*(rows for rows in steps if rows < max_sequences), min(max_sequences, 512))
        mixed = (32, 64, *range(128, 385, 64), *range(512, most_mixed + 1, 128))
        return cls(tuple(sorted(set(decode))), tuple(rows for rows in mixed if rows <= max_rows))

    @property
    def largest(self) -> int:
        return max((*self.decode, *self.mixed), default=0)

    def fitting(self, rows: int, decode: bool) -> int:
        """The smallest captured step for so many rows; 0: there is none."""
        sizes = self.decode if decode else self.mixed
        return next((size for size in sizes if size >= rows > 0), 0)


@dataclass(frozen=True, slots=True)
class LoRAPlans:
    """The families of captured steps with LoRA, by the number of rows."""

    max_loras: int
    max_rank: int

    def of_decode(self, rows: int) -> tuple[LaunchPlan, ...]:
        """Row by row; for each height of a tile, few entries of up to 16 rows, and as many of those as any
        step on 64 slots has. Where there are more slots, also as for 128, 256, .. and all of them, for the
        usual height alone."""
        return _of_decode(rows, self.max_loras, self._tiles)

    def of_mixed(self, rows: int) -> tuple[LaunchPlan, ...]:
        """The same as `of_decode`, neither row by row nor of few entries."""
        return _shared(rows, self.max_loras, self._tiles, few=())

    def for_any(self, rows: int, decode: bool) -> LaunchPlan:
        """The one of them that every step of so many rows fits, if not always as the fastest."""
        return (self.of_decode(rows) if decode else self.of_mixed(rows))[-1]

    def choose(
        self, runs: Runs, rows: int, decode: bool, slot_ranks: npt.NDArray[np.int32]
    ) -> LaunchPlan | None:
        """The family for a step of these runs (slot, rows), filled up to `rows`; None without adapters.
        `slot_ranks`: each slot's highest rank."""
        own = runs[runs[:, 0] >= 0]
        if not len(own):
            return None
        plans = self.of_decode(rows) if decode else self.of_mixed(rows)
        rows_of = np.bincount(own[:, 0], weights=own[:, 1]).astype(np.int32)
        active = rows_of.nonzero()[0]
        counts = rows_of[active]
        items = int((-(-counts // ROWS_PER_ITEM)).sum())
        typical = typical_class(counts, slot_ranks[active])
        tile = self._tiles[-1 if typical > _USUAL_TILE else 0]
        # 64 sequences on 32 adapters of rank 64: 5,970 tok/s, row by row 5,670; of rank 32: 6,490 and 6,840
        # (H200, slots for rank 64).
        few_each = counts.sum() <= (1 if typical > 32 else 2) * len(active)
        if plans[0].rows_per_item == 1 and (len(plans) == 1 or few_each):
            return plans[0]
        fitting = (plan for plan in plans if plan.rows_per_item > 1 and plan.items >= items)
        return min(fitting, key=lambda plan: (plan.block_rank != tile, plan.items))

    @property
    def _tiles(self) -> tuple[int, ...]:
        """Heights, ascending."""
        highest = rank_classes(self.max_rank)[-1]
        return (highest,) if highest <= _USUAL_TILE else (_USUAL_TILE, highest)


@lru_cache(maxsize=1024)
def _of_decode(rows: int, max_loras: int, tiles: tuple[int, ...]) -> tuple[LaunchPlan, ...]:
    single = LaunchPlan.for_graph(rows, max_loras, rows_per_item=1, block_rank=tiles[0])
    if rows <= _FEW_ITEMS[0]:
        return (single,)
    shared = _shared(rows, max_loras, tiles, _FEW_ITEMS)
    return (single, *shared) if rows <= MAX_SINGLE_ROWS else shared


@lru_cache(maxsize=1024)
def _shared(
    rows: int, max_loras: int, tiles: tuple[int, ...], few: tuple[int, ...]
) -> tuple[LaunchPlan, ...]:
    """The last one fits every step."""
    plans: list[LaunchPlan] = []
    for tile in tiles:
        usual = LaunchPlan.for_graph(rows, min(max_loras, _USUAL_SLOTS), block_rank=tile)
        plans += (replace(usual, items=items) for items in few if items < usual.items)
        plans.append(usual)
    slots = _USUAL_SLOTS
    while slots < max_loras:
        slots = min(2 * slots, max_loras)
        more = LaunchPlan.for_graph(rows, slots, block_rank=tiles[0])
        if more.items > plans[-1].items:
            plans.append(more)
    return tuple(plans)


def rehearsal_runs(plan: LaunchPlan | None, rows: int) -> Runs:
    """Runs: as many of `rows` rows on one slot as fit the plan; the others have no adapter."""
    own = 0 if plan is None else min(rows, plan.items * plan.rows_per_item)
    runs = np.array([(0, own), (-1, rows - own)], dtype=np.int32)
    return runs[runs[:, 1] > 0]


def step_runs(sequences: Sequence[SequenceRows], rows: int = 0) -> Runs:
    """(slot, rows) of each sequence; then what fills the step up to `rows`, which has no adapter."""
    count = len(sequences)
    runs = np.empty((count + 1, 2), dtype=np.int32)
    runs[:count, 0] = [sequence.slot for sequence in sequences]
    runs[:count, 1] = [len(sequence.token_ids) for sequence in sequences]
    runs[count] = -1, max(0, rows - int(runs[:count, 1].sum()))
    return runs if runs[count, 1] else runs[:count]


def head_runs(sequences: Sequence[SequenceRows]) -> Runs:
    """(slot, rows that reach the head) of each sequence."""
    pairs = [(sequence.slot, len(sequence.logit_rows)) for sequence in sequences]
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)
