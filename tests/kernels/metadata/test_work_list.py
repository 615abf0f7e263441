"""How a step is cut: every row of every adapter is in exactly one whole item, or in one item's parts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.errors import KernelArgumentError
from kernels.metadata.launch_plan import PARTS, ROWS_PER_TILE, WHOLE, LaunchPlan
from kernels.metadata.work_list import Ints, Run, describe

RUNS = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 70)), max_size=24)
RANKS = st.lists(st.sampled_from([0, 1, 8, 9, 16, 64, 65, 256]), min_size=6, max_size=6)


def places(entries: Ints, rows_per_entry: int) -> Counter[tuple[int, int]]:
    """(slot, place) of every row; a row in parts counts once, if all its parts are there."""
    found: Counter[tuple[int, int]] = Counter()
    parts: dict[tuple[int, int, int], list[int]] = {}
    for slot, start, count, part in entries.tolist():
        assert 1 <= count <= rows_per_entry
        if part == WHOLE:
            found.update((slot, start + row) for row in range(count))
        else:
            parts.setdefault((slot, start, count), []).append(part)
    for (slot, start, count), numbers in parts.items():
        assert numbers == list(range(PARTS))
        found.update((slot, start + row) for row in range(count))
    return found


def rows_of(runs: list[Run]) -> Counter[tuple[int, int]]:
    slots = sorted(slot for slot, rows in runs for _ in range(rows) if slot >= 0)
    return Counter((slot, place) for place, slot in enumerate(slots))


@given(runs=RUNS, ranks=RANKS)
def test_every_row_is_in_one_item_and_one_tile(runs: list[Run], ranks: list[int]) -> None:
    work = describe(runs, 6, 24 * 70, 2000, np.array(ranks, dtype=np.int32), None)
    assert places(work.items, work.plan.rows_per_item) == rows_of(runs)
    assert (work.plan.items, work.plan.tiles) == (len(work.items), len(work.tiles))
    if work.plan.tiles:
        assert places(work.tiles, ROWS_PER_TILE) == rows_of(runs)


@given(runs=RUNS, ranks=RANKS, rows_per_item=st.sampled_from([1, 16]), parts=st.booleans())
def test_a_graphs_plan_holds_every_step_of_its_rows(
    runs: list[Run], ranks: list[int], rows_per_item: int, parts: bool
) -> None:
    rows = sum(count for _, count in runs)
    plan = LaunchPlan.for_graph(rows, 6, rows_per_item=rows_per_item, block_rank=8, parts=parts)
    work = describe(runs, 6, 24 * 70, 2000, np.array(ranks, dtype=np.int32), plan)
    assert work.plan == plan
    assert len(work.items) <= plan.items
    assert places(work.items, rows_per_item) == rows_of(runs)


def test_high_ranks_come_first_in_parts() -> None:
    ranks = np.array([8, 8, 256, 8], dtype=np.int32)
    work = describe([(slot, 1) for slot in range(4)], 4, 16, 64, ranks, None)
    assert (work.plan.block_rank, work.plan.parts) == (8, True)
    assert work.items[:, 0].tolist() == [2] * PARTS + [0, 1, 3]


def test_a_plan_that_is_too_small_is_refused() -> None:
    plan = LaunchPlan.for_graph(4, 4, rows_per_item=1)
    with pytest.raises(KernelArgumentError, match=r"^plan .* too small for 5 items"):
        describe([(0, 5)], 4, 16, 64, np.full(4, 16, dtype=np.int32), plan)
