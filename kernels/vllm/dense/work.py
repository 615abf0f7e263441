"""Whose rows the programs of a small step have, made on the host: then no program has to find out.

An entry is a row that works alone, or a member of a team: up to TEAM neighbouring places of one slot share
their work. Those with something to shrink come first, and nothing waits behind idle programs.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.vllm.kernel_meta import TokenGroups
from kernels.vllm.step_buffers import Field

FEW_ROWS = 8
# Steps with more rows never take them one by one.
MOST_SINGLE_ROWS = 256
# Up to two rows of a slot are worth more apart; of a higher rank, one.
_LOW_RANK = 16
TEAM = 16

WORK = Field((5, MOST_SINGLE_ROWS))
"""Rows of the table: slot, first place of the team, its members (0: no work), number among them, row."""


def rows_a_slot(rows: int, rank: int) -> int:
    """Slots with no more rows than this take them one by one, in a step of so many."""
    if rows <= FEW_ROWS:
        return FEW_ROWS
    return 2 if rank <= _LOW_RANK else 1


def write_work(work: npt.NDArray[Any], groups: TokenGroups, rank: int) -> None:
    """Fill int32 [5, MOST_SINGLE_ROWS] for a step whose adapters have `rank`; with zeros for one with more
    rows, of which nothing is told."""
    work.fill(0)
    order, ids, counts = groups.order, groups.ids, groups.counts
    rows = len(order)
    if groups.no_lora or rows > MOST_SINGLE_ROWS:
        return
    starts = np.cumsum(counts) - counts
    group = np.repeat(np.arange(len(ids)), counts)
    place, size = np.arange(rows), counts[group]
    alone = size <= rows_a_slot(rows, rank)
    number = np.where(alone, 0, (place - starts[group]) % TEAM)
    members = np.where(alone, 1, np.minimum(size - (place - number - starts[group]), TEAM))
    told = np.stack([ids[group], place - number, members, number, order])[:, ids[group] >= 0]
    work[:, : told.shape[1]] = told[:, np.argsort(told[3], kind="stable")]
