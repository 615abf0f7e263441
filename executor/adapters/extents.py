"""Room in one contiguous piece of memory, given out and taken back. Pure: offsets and sizes."""

from bisect import bisect_left, insort


class Extents:
    """Free room is kept as maximal runs (start, size), in order; the smallest that fits is cut."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Where `size` units begin that are the caller's until given back; None: no free run is so long."""
        fitting = [run for run in self._free if run[1] >= size]
        if not fitting:
            return None
        start, room = min(fitting, key=lambda run: run[1])
        index = bisect_left(self._free, (start, room))
        self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
        return start

    def give(self, start: int, size: int) -> None:
        """Back with what was taken, whole. RuntimeError when some of it is free already."""
        index = bisect_left(self._free, (start, 0))
        before = self._free[index - 1] if index else (0, 0)
        after = self._free[index] if index < len(self._free) else (self.size, 0)
        if before[0] + before[1] > start or start + size > after[0]:
            raise RuntimeError(f"[{start}, {start + size}) is given back twice or never was taken")
        if index and before[0] + before[1] == start:
            self._free.remove(before)
            start, size = before[0], before[1] + size
        if after[1] and start + size == after[0]:
            self._free.remove(after)
            size += after[1]
        insort(self._free, (start, size))
