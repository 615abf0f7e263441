"""One meta's fields in one host buffer, written with few and short numpy operations."""

from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from kernels.work_list import StepWork

_IDLE_ENTRY = np.array([-1, 0, 0, 0], dtype=np.int32)


class HostFields:
    """Views of the fields, in their order. What a step does not fill has its idle value: no slot, no rows.

    Only what the last step filled here can differ from that, so only it is restored.
    """

    def __init__(self, part: npt.NDArray[np.int32], sizes: list[int]) -> None:
        fields = [part[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
        self._items, self._tiles = fields[0].reshape(-1, 4), fields[1].reshape(-1, 4)
        self._per_lora, self._starts, self._ids, self._mapping, self._order = fields[2:]
        self._items[:], self._tiles[:] = _IDLE_ENTRY, _IDLE_ENTRY
        self._ids.fill(-1)
        self._mapping.fill(-1)
        for field in (self._per_lora, self._starts, self._order):
            field.fill(0)
        self._used = (0, 0, 0, 0)

    def write(self, work: StepWork) -> None:
        used = (len(work.items), len(work.tiles), len(work.active), len(work.slots))
        items, tiles, active, rows = used
        self._restore(used)
        self._items[:items] = work.items
        self._tiles[:tiles] = work.tiles
        self._per_lora[:active] = work.counts
        self._per_lora.cumsum(out=self._starts[1:])
        self._ids[:active] = work.active
        self._mapping[:rows] = work.slots
        self._order[:rows] = work.order

    def _restore(self, used: tuple[int, int, int, int]) -> None:
        before, self._used = self._used, used
        for field, value, now, then in (
            (self._items, _IDLE_ENTRY, used[0], before[0]),
            (self._tiles, _IDLE_ENTRY, used[1], before[1]),
            (self._per_lora, 0, used[2], before[2]),
            (self._ids, -1, used[2], before[2]),
            (self._mapping, -1, used[3], before[3]),
            (self._order, 0, used[3], before[3]),
        ):
            if then > now:
                field[now:then] = value
