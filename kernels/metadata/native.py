"""Describes a step in C, for metadata on a GPU: the C compiler that Triton needs is there anyway."""

import logging
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernels.metadata import work_list
from kernels.metadata.host_fields import HostFields
from kernels.metadata.launch_plan import PARTS, RANK_CLASSES, ROWS_PER_ITEM, ROWS_PER_TILE, LaunchPlan
from kernels.metadata.work_list import Ints, Runs, StepWork, as_pairs, choose, high_limit, settled

_CLASSES = np.array(RANK_CLASSES, dtype=np.int32)
_NO_LIMIT = 2**31 - 1

_log = logging.getLogger(__name__)


@lru_cache
def load() -> Any | None:
    """kernels/metadata/work_list.c as a module, compiled once a machine; None where that fails."""
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_name("work_list.c").read_text()
    try:
        return compile_module_from_src(source, "lorafleet_work_list")
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        _log.warning(
            "kernels/metadata/work_list.c is not compiled, a step's metadata takes longer: %s", error
        )
        return None


class NativeWork(NamedTuple):
    """The same as StepWork: a step that was checked and counted, but is only cut while it is written.

    A tuple, as one is made twice a step: a frozen dataclass takes four times as long.
    """

    module: Any
    runs: bytes | bytearray
    ranks: bytes
    totals: bytearray
    cut: tuple[int, int, int, int]  # rows an item, rows a tile or 0, the limit of high ranks, their copies
    plan: LaunchPlan
    num_rows: int
    num_active: int

    def write(self, fields: HostFields) -> None:
        self.module.write(
            fields.buffer, fields.used, fields.sizes, self.runs, self.ranks, self.totals, *self.cut
        )


Work = StepWork | NativeWork


def describe(
    module: Any,
    runs: Runs,
    max_loras: int,
    max_rows: int,
    max_items: int,
    slot_ranks: Ints,
    plan: LaunchPlan | None,
) -> Work:
    """Does what work_list.describe does, errors included."""
    # Copies: what is written later must be what is counted now, or it would not fit the buffer.
    pairs, ranks = _pairs(module, runs), slot_ranks.tobytes()
    totals = bytearray(8 * (max_loras + 1))
    per_item = plan.rows_per_item if plan else ROWS_PER_ITEM
    counted = module.count(pairs, ranks, _CLASSES, totals, max_rows, per_item, ROWS_PER_TILE)
    if counted is None:
        refused = np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2)
        return work_list.describe(refused, max_loras, max_rows, max_items, slot_ranks, plan)  # says why not
    rows, active, highest, class_rows, base_rows, items, tiles = counted
    chosen = plan or choose(rows - base_rows, active, highest, class_rows)
    per_item, per_tile, limit, copies = chosen.rows_per_item, ROWS_PER_TILE, _NO_LIMIT, 0
    if per_item == 1:
        items = rows - base_rows
    if not chosen.tiles:
        per_tile = tiles = 0
    if chosen.parts:
        limit = high_limit(chosen.block_rank)
        more = module.high(totals, ranks, per_item, limit) * (PARTS - 1)
        if items + more <= (chosen.items or max_items):
            items, copies = items + more, PARTS
    final = settled(chosen, plan, items, tiles, base_rows)
    return NativeWork(module, pairs, ranks, totals, (per_item, per_tile, limit, copies), final, rows, active)


def _pairs(module: Any, runs: Runs) -> bytes | bytearray:
    """`runs` as int32 (slot, rows), one behind the other."""
    if isinstance(runs, tuple):
        pairs = bytearray(8 * len(runs))
        if module.pairs(runs, pairs):
            return pairs
    return as_pairs(runs).tobytes()
