"""The steps that a forward pass runs before it is ready, so that nothing compiles afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, product, takewhile

from executor.gpu.graph_plans import MOST_MIXED_ROWS
from executor.layers.attention import KVCache
from executor.step.inputs import SequenceRows
from kernels.launching.follower_tuning import MOSTLY_BASE
from kernels.metadata.launch_plan import (
    MAX_SINGLE_ROWS,
    ROWS_PER_ITEM,
    ROWS_PER_TILE,
    SPARE_ITEMS,
    LaunchPlan,
    most_pieces,
    rank_classes,
)
from kernels.metadata.work_list import high_limit

# (slot, rows) of each sequence.
_Rows = list[tuple[int, int]]
# Entries and tiles from which on kernels/launching/*tuning.py and kernels/lora_*_fp8.py choose otherwise. A
# step with tiles has at least 8, and 32 entries.
_ENTRY_STEPS = (1, 8, 25, 32, 64, 128)
_TILE_STEPS = (8, 32, 33, 43, 65, 128)
_LEAST_TILED_ITEMS = 32


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps that will come: rows, sequences, tokens of a sequence, slots and ranks in them."""

    max_rows: int
    max_sequences: int
    max_model_len: int
    max_loras: int
    max_rank: int

    @property
    def warm_up_sequences(self) -> int:
        """Most sequences of a step of `warm_up_steps`."""
        return self.max_loras + 1 + -(-self.max_rows // self.max_model_len)


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """plan: what the LoRA work of layers and head is to be launched as; None: as suits the rows."""

    sequences: list[SequenceRows]
    plan: LaunchPlan | None


def warm_up_steps(limits: StepLimits, kv_cache: KVCache, *, experts: bool) -> Iterator[WarmUpStep]:
    """The largest steps, for the memory that they take; then one for each choice that the tuning of LoRA's
    kernels makes between plans, whatever steps bring them. `experts`: of a model that has some."""
    steps = chain(_large_steps(limits), _lora_steps(limits), _expert_steps(limits) if experts else ())
    for rows, plan in steps:
        yield WarmUpStep(_sequences(rows, limits, kv_cache), plan)


def _large_steps(limits: StepLimits) -> Iterator[tuple[_Rows, LaunchPlan | None]]:
    most = limits.max_rows
    yield [(-1, most)], None
    for slots in {1, min(8, limits.max_loras, most)}:
        yield [(slot, most // slots) for slot in range(slots)], None
    # What shrink writes is as long as the step, and cut most often for a row by itself.
    yield [(0, 1), (-1, most - 1)], LaunchPlan(1, rank_classes(limits.max_rank)[-1], 1, 0, False, most)


def _lora_steps(limits: StepLimits) -> Iterator[tuple[_Rows, LaunchPlan]]:
    """A row of each of several slots, and as many others as are said to be there."""
    for plan in _plans(limits):
        slots = min(plan.tiles or plan.items, limits.max_loras, limits.max_rows)
        rows = [(slot, 1) for slot in range(slots)]
        if others := min(plan.base_rows, limits.max_rows - slots):
            rows.append((-1, others))
        yield rows, plan


def _expert_steps(limits: StepLimits) -> Iterator[tuple[_Rows, LaunchPlan]]:
    """What experts run depends on the rows, too, and on how many slots a plan has room for. One adapter, as
    rows are most likely to share its experts' weights then; where they do not there is one form for each
    height of a tile, which other steps bring."""
    most = min(limits.max_loras, limits.max_rows)
    for rows, slots in product(_doubled(MOST_MIXED_ROWS, limits.max_rows), _doubled(1, most)):
        for block_rank in rank_classes(limits.max_rank):
            step = [(0, 1), (-1, rows - 1)]
            yield step, LaunchPlan(ROWS_PER_ITEM, block_rank, slots, 0, False, rows)


def _doubled(first: int, last: int) -> list[int]:
    """first, twice that, .., last."""
    return [*takewhile(lambda number: number < last, (first << i for i in count())), last]


def _plans(limits: StepLimits) -> Iterator[LaunchPlan]:
    """One for each answer to all that the tuning asks, and a few that no step gets."""
    most = most_pieces(limits.max_rows, limits.max_loras, ROWS_PER_ITEM)
    most_tiles = most_pieces(limits.max_rows, limits.max_loras, ROWS_PER_TILE)
    for block_rank in rank_classes(limits.max_rank):
        has_parts = (False, True) if limits.max_rank > high_limit(block_rank) else (False,)
        for parts, rows_per_item, items in product(has_parts, (1, ROWS_PER_ITEM), _ENTRY_STEPS):
            room = min(limits.max_rows, MAX_SINGLE_ROWS) if rows_per_item == 1 else most
            if items > room + parts * SPARE_ITEMS:
                continue
            base = MOSTLY_BASE * items * rows_per_item
            yield LaunchPlan(rows_per_item, block_rank, items, 0, parts, base)
            if base < limits.max_rows:
                yield LaunchPlan(rows_per_item, block_rank, items, 0, parts, base + 1)
        for tiles in (tiles for tiles in _TILE_STEPS if tiles <= most_tiles):
            if (items := max(tiles, _LEAST_TILED_ITEMS)) <= most:
                yield LaunchPlan(ROWS_PER_ITEM, block_rank, items, tiles, False)


def _sequences(step: _Rows, limits: StepLimits, kv_cache: KVCache) -> list[SequenceRows]:
    """They read and write the spare block, and ask for as many logits as a step can: the head's adapters have
    forms of their own, in captured steps, too."""
    sequences: list[SequenceRows] = []
    logits = limits.max_sequences
    for slot, rows in step:
        for start in range(0, rows, limits.max_model_len):
            count = min(limits.max_model_len, rows - start)
            blocks = [kv_cache.num_blocks] * -(-count // kv_cache.block_size)
            wanted = range(min(count, logits))
            logits -= len(wanted)
            sequences.append(SequenceRows([0] * count, 0, blocks, slot, wanted))
    return sequences
