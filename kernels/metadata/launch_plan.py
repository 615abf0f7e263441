"""How a step's LoRA work is cut into programs: the host's choice, and what a captured graph freezes."""

from bisect import bisect_left
from dataclasses import dataclass

# Slices of one launch: q, k, v.
MAX_SLICES = 3
# Items of up to 16 rows: the smallest height of a matrix instruction, and what expand's prefill likes best.
ROWS_PER_ITEM = 16
# Shrink's tile in prefill, where x is the bulk of the bytes and all slices share one read of it.
ROWS_PER_TILE = 64
# A high-rank item becomes this many entries: a share of its ranks each in shrink, of the columns in expand.
PARTS = 16
WHOLE = -1
RANK_CLASSES = (8, 16, 32, 64)
# Steps with more rows than this never run row by row.
MAX_SINGLE_ROWS = 256
# Entries kept free for the parts of one high-rank item when a grid is sized without knowing the ranks.
SPARE_ITEMS = PARTS - 1


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Grid sizes and tile heights of one step, chosen on the host before the launch.

    rows_per_item  1: every row by itself, for steps of mostly distinct adapters; 16: up to 16 rows of a slot
    block_rank     8, 16, 32 or 64: height of a rank tile. Any rank is right under any height
    items          programs launched per tile column; a step with fewer leaves the others idle
    tiles          64-row tiles for shrink, 0: shrink runs over the items
    parts          whether items of ranks far above block_rank are cut into parts, to run side by side
    base_rows      rows without an adapter that a fused follower covers; shrink and expand never see them

    A captured graph replays every step that was prepared with the plan of its capture.
    """

    rows_per_item: int
    block_rank: int
    items: int
    tiles: int
    parts: bool
    base_rows: int = 0

    @classmethod
    def for_graph(
        cls,
        rows: int,
        max_loras: int,
        *,
        rows_per_item: int = ROWS_PER_ITEM,
        block_rank: int = 16,
        parts: bool = False,
    ) -> "LaunchPlan":
        """The plan that holds every step of at most `rows` rows: any adapters, counts and ranks, or none."""
        items = rows if rows_per_item == 1 else most_pieces(rows, max_loras, rows_per_item)
        return cls(rows_per_item, block_rank, items + (SPARE_ITEMS if parts else 0), 0, parts, rows)


def rank_classes(max_rank: int) -> tuple[int, ...]:
    """What steps are cut for whose ranks are up to `max_rank`: classes up to the first that holds it."""
    return RANK_CLASSES[: bisect_left(RANK_CLASSES, max_rank) + 1]


def most_pieces(rows: int, max_loras: int, rows_per_piece: int) -> int:
    """Pieces of up to `rows_per_piece` rows that `rows` rows of `max_loras` slots can need."""
    return min(rows, max_loras + rows // rows_per_piece)
