"""A step's description in C, for metadata on a GPU: the C compiler that Triton needs is there anyway."""

import logging
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kernels import work_list
from kernels.host_fields import HostFields
from kernels.launch_plan import PARTS, RANK_CLASSES, ROWS_PER_TILE, LaunchPlan
from kernels.work_list import Ints, Runs, StepWork, as_pairs, choose, high_limit, settled

_CLASSES = np.array(RANK_CLASSES, dtype=np.int32)
_NO_LIMIT = 2**31 - 1

_log = logging.getLogger(__name__)


@lru_cache
def load() -> Any | None:
    """kernels/work_list.c as a module, compiled once a machine; None where that fails."""
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_name("work_list.c").read_text()
    try:
        return compile_module_from_src(source, "lorafleet_work_list")
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        _log.warning("no C compiler for kernels/work_list.c, a step's metadata takes longer: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class NativeWork:
    """As StepWork: a step that was checked and counted, but is only cut while it is written."""

    module: Any
    runs: Ints
    ranks: Ints
    totals: Ints
    plan: LaunchPlan
    copies: int
    num_rows: int
    num_active: int

    def write(self, fields: HostFields) -> None:
        plan = self.plan
        limit = high_limit(plan.block_rank) if plan.parts else _NO_LIMIT
        per_tile = ROWS_PER_TILE if plan.tiles else 0
        self.module.write(
            fields.buffer, fields.used, fields.sizes, self.runs, self.ranks, self.totals, plan.rows_per_item,
            per_tile, limit, self.copies,
        )  # fmt: skip


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
    """As work_list.describe, errors included."""
    pairs = _pairs(module, runs)
    totals = np.empty(2 * (max_loras + 1), dtype=np.int32)
    counted = module.count(pairs, slot_ranks, _CLASSES, totals, max_rows)
    if counted is None:
        return work_list.describe(pairs, max_loras, max_rows, max_items, slot_ranks, plan)  # says why not
    rows, active, highest, class_rows = counted
    base_rows = int(totals[0])
    chosen = plan or choose(rows - base_rows, active, highest, class_rows)
    items, copies = module.size(totals, chosen.rows_per_item), 0
    if chosen.parts:
        high = module.high(totals, slot_ranks, chosen.rows_per_item, high_limit(chosen.block_rank))
        if items + high * (PARTS - 1) <= (chosen.items or max_items):
            items, copies = items + high * (PARTS - 1), PARTS
    tiles = module.size(totals, ROWS_PER_TILE) if chosen.tiles else 0
    final = settled(chosen, plan, items, tiles, base_rows)
    return NativeWork(module, pairs, slot_ranks, totals, final, copies, rows, active)


def _pairs(module: Any, runs: Runs) -> Ints:
    if isinstance(runs, tuple):
        pairs = np.empty((len(runs), 2), dtype=np.int32)
        if module.pairs(runs, pairs):
            return pairs
    return np.ascontiguousarray(as_pairs(runs))
