"""The steps that a forward pass runs before it is ready, so that nothing compiles afterwards."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import product

from executor.attention import KVCache
from executor.forward import SequenceRows
from executor.graph_plans import MOST_MIXED_ROWS, head_runs, step_runs
from kernels.follower_tuning import MOSTLY_BASE
from kernels.launch_plan import MAX_SINGLE_ROWS, RANK_CLASSES, ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan
from kernels.punica import PunicaWrapperBase

# (slot, rows) of each sequence.
_Step = list[tuple[int, int]]
# Tiles at which kernels/tuning.py splits shrink into 4, 3, 2 and 1 parts, behind the product and beside it.
_TILED_ROWS = (10, 20, 32, 34, 44, 66)
# Entries and tiles from which on kernels/*tuning.py and kernels/lora_*_fp8.py choose otherwise.
_ENTRY_STEPS = (8, 25, 32, 64, 128)
_TILE_STEPS = (1, 32, 33, 43, 65, 128)
# Rows of a slot that bring steps between all of those, with few slots and with many.
_ROWS_OF_A_SLOT = (1, 2, 3, 9, 17, 33, 65, 129, 256, 400, 511, 520, 2049)


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


def warm_up_steps(
    limits: StepLimits, kv_cache: KVCache, punica: PunicaWrapperBase
) -> Iterator[list[SequenceRows]]:
    """Steps that are not captured, one for each choice that the kernels' tuning makes between them. While
    they run the slots' told ranks change; at the end they are what they were."""
    told = punica.token_mapping_meta.slot_ranks.copy()
    seen: set[Hashable] = set()
    for high, first, rank, steps in _by_rank(limits):
        for slot in range(limits.max_loras):
            punica.set_slot_rank(slot, rank if slot >= high else first)
        for step in steps:
            sequences = _sequences(step, limits, kv_cache)
            seen |= _choices(sequences, punica)
            yield sequences
        for step in _other_steps(limits):
            sequences = _sequences(step, limits, kv_cache)
            if not (choices := _choices(sequences, punica)) <= seen:
                seen |= choices
                yield sequences
    for slot, rank in enumerate(told.tolist()):
        punica.set_slot_rank(slot, rank)


def _choices(sequences: list[SequenceRows], punica: PunicaWrapperBase) -> set[Hashable]:
    """What the tuning goes by: in the layers, and at the head."""
    layers = punica.token_mapping_meta.describe(step_runs(sequences)).plan
    head = punica.prompt_mapping_meta.describe(head_runs(sequences)).plan
    return {("layers", _choice(layers)), ("head", _choice(head))}


def _choice(plan: LaunchPlan) -> Hashable:
    mostly_base = plan.base_rows > MOSTLY_BASE * plan.items * plan.rows_per_item
    if plan.tiles:
        return plan.block_rank, sum(plan.tiles >= step for step in _TILE_STEPS)
    entries = sum(plan.items >= step for step in _ENTRY_STEPS)
    return plan.block_rank, plan.rows_per_item, plan.parts, entries, mostly_base


def _by_rank(limits: StepLimits) -> Iterator[tuple[int, int, int, list[_Step]]]:
    """(slots that are different, their rank, rank of the others, steps): all alike, from the lowest class of
    ranks to the highest that a slot can have; then one of the highest rank, or a quarter of all, among lower
    ones, which may be cut into parts."""
    most, low = limits.max_rows, RANK_CLASSES[0]
    sparse, dense = _sparse_steps(limits), _dense_steps(limits)
    yield 0, low, low, [[(-1, most)], [(-1, min(most, MOST_MIXED_ROWS + 1))], *sparse]
    highest = next((c for c in RANK_CLASSES if c >= limits.max_rank), RANK_CLASSES[-1])
    for rank in (c for c in RANK_CLASSES[1:] if c <= highest):
        yield 0, rank, rank, [*sparse, *dense]
    for rank in (c for c in RANK_CLASSES if c < highest):
        yield 1, limits.max_rank, rank, sparse
        yield limits.max_loras // 4, limits.max_rank, rank, []


def _sparse_steps(limits: StepLimits) -> list[_Step]:
    """A few rows with adapters, in steps that are too large to be captured: beside as few others as that
    takes, and beside so many that what follows a layer is done by itself."""
    # Row by row with few, some and many entries; then entries of up to 16 rows.
    shapes = [
        (1, 1),
        (8, 1),
        (16, 1),
        (64, 1),
        (64, 2),
        (128, 1),
        (1, 64),
        (8, 8),
        (8, 17),
        (16, 8),
        (32, 8),
        (32, 9),
        (1, MAX_SINGLE_ROWS),
    ]
    steps = []
    for count, rows in dict.fromkeys((min(adapters, limits.max_loras), rows) for adapters, rows in shapes):
        # What the entries have room for: one or two rows a slot go row by row.
        room = count * rows if rows < 3 else count * -(-rows // ROWS_PER_ITEM) * ROWS_PER_ITEM
        few = max(1, MOST_MIXED_ROWS + 1 - count * rows)
        for others in sorted({few, max(few, MOSTLY_BASE * room + 1)}):
            others = min(others, limits.max_rows - count * rows)
            if others > 0:
                steps.append([*((slot, rows) for slot in range(count)), (-1, others)])
    return steps


def _dense_steps(limits: StepLimits) -> list[_Step]:
    rows = {tiles * ROWS_PER_TILE for tiles in _TILED_ROWS} | {limits.max_rows}
    fitting = sorted(count for count in rows if MOST_MIXED_ROWS < count <= limits.max_rows)
    few = min(8, limits.max_loras)
    steps = [[(0, count)] for count in fitting]
    # A slot's last tile may have one row alone: so fewer rows have as many tiles.
    for tiles in (tiles for tiles in _TILE_STEPS if tiles * ROWS_PER_TILE > limits.max_rows):
        slots = -(-(tiles * ROWS_PER_TILE - limits.max_rows) // (ROWS_PER_TILE - 1))
        if slots <= min(limits.max_loras, tiles // 2):
            own = [tiles // slots + (slot < tiles % slots) for slot in range(slots)]
            steps.append([(slot, ROWS_PER_TILE * (count - 1) + 1) for slot, count in enumerate(own)])
    if limits.max_rows > MOST_MIXED_ROWS:
        steps.append([(slot, limits.max_rows // few) for slot in range(few)])
    return steps


def _other_steps(limits: StepLimits) -> Iterator[_Step]:
    """Steps of every kind, smaller ones first, of which few are like none of the others."""
    slots = sorted({min(count, limits.max_loras) for count in (1, 2, 4, 8, 16, 32, 64, limits.max_loras)})
    for count, rows in sorted(product(slots, _ROWS_OF_A_SLOT), key=lambda own: own[0] * own[1]):
        own, entries = count * rows, count * -(-rows // ROWS_PER_ITEM)
        least = max(0, MOST_MIXED_ROWS + 1 - own)
        for others in sorted({least, MOSTLY_BASE * own + 1, MOSTLY_BASE * entries * ROWS_PER_ITEM + 1}):
            if least <= others <= limits.max_rows - own:
                yield [*((slot, rows) for slot in range(count)), (-1, others)]


def _sequences(step: _Step, limits: StepLimits, kv_cache: KVCache) -> list[SequenceRows]:
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
