"""The fields of one step's description, as views of one host buffer."""

from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

_IDLE_ENTRY = np.array([-1, 0, 0, 0], dtype=np.int32)


class HostFields:
    """Views of the fields, in their order. What a step does not fill has its idle value: no slot, no rows.

    Only what the last step filled here can differ from that, so only it is restored. `used` says how many
    items, tiles, slots and rows that were.
    """

    def __init__(self, buffer: npt.NDArray[np.int32], sizes: list[int]) -> None:
        fields = [buffer[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
        self.items, self.tiles = fields[0].reshape(-1, 4), fields[1].reshape(-1, 4)
        self.per_lora, self.starts, self.ids, self.mapping, self.order = fields[2:]
        self.items[:], self.tiles[:] = _IDLE_ENTRY, _IDLE_ENTRY
        self.ids.fill(-1)
        self.mapping.fill(-1)
        for field in (self.per_lora, self.starts, self.order):
            field.fill(0)
        self.buffer = buffer
        self.sizes = np.array(sizes, dtype=np.int32)
        self.used = np.zeros(4, dtype=np.int32)

    def restore_beyond(self, used: tuple[int, int, int, int]) -> None:
        """Make idle again what was filled and is not now."""
        before = self.used.tolist()
        self.used[:] = used
        for field, value, now, then in (
            (self.items, _IDLE_ENTRY, used[0], before[0]),
            (self.tiles, _IDLE_ENTRY, used[1], before[1]),
            (self.per_lora, 0, used[2], before[2]),
            (self.ids, -1, used[2], before[2]),
            (self.mapping, -1, used[3], before[3]),
            (self.order, 0, used[3], before[3]),
        ):
            if then > now:
                field[now:then] = value
