"""Which executors have the most room, without a look at each. Pure."""

from collections.abc import Iterator


def bits(mask: int) -> Iterator[int]:
    """The positions of a set that is held as an int."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def lowest(mask: int) -> int:
    """The first position of a set that is not empty."""
    return (mask & -mask).bit_length() - 1


class Levels:
    """Executors by their room. Sets of executors are ints: bit i is the executor at position i.

    Room is told exactly below 16, and to one eighth above: those who share a level count as equal.
    """

    def __init__(self, size: int) -> None:
        """All of them begin with room 0."""
        self.rooms = [0] * size  # For reading.
        self._levels = [0] * size
        self._masks: dict[int, int] = {0: (1 << size) - 1}
        self._used = int(size > 0)  # Bit n: somebody is on level n.

    def grow(self, size: int) -> None:
        """There are as many positions from now on, the further ones with room 0. They never get fewer."""
        more = size - len(self.rooms)
        if more > 0:
            self._masks[0] = self._masks.get(0, 0) | (1 << size) - (1 << len(self.rooms))
            self._used |= 1
            self.rooms += [0] * more
            self._levels += [0] * more

    def put(self, position: int, room: int) -> None:
        self.rooms[position] = room
        before, level = self._levels[position], _level(room)
        if before == level:
            return
        self._levels[position] = level
        bit = 1 << position
        self._masks[before] ^= bit
        if not self._masks[before]:
            self._used ^= 1 << before
        self._masks[level] = self._masks.get(level, 0) | bit
        self._used |= 1 << level

    def most(self, mask: int) -> int:
        """Those of `mask` who share the highest level among them."""
        used = self._used
        while used:
            level = used.bit_length() - 1
            if found := self._masks[level] & mask:
                return found
            used ^= 1 << level
        return 0

    def check(self, rooms: list[int]) -> None:
        """Raises AssertionError when a level is not that of the room."""
        assert self.rooms == rooms
        assert self._levels == [_level(room) for room in rooms]
        for level, mask in self._masks.items():
            assert mask == sum(1 << at for at, found in enumerate(self._levels) if found == level)
            assert bool(mask) == bool(self._used >> level & 1)


def _level(room: int) -> int:
    if room < 16:
        return room
    shift = room.bit_length() - 4
    return (shift << 3) + (room >> shift)
