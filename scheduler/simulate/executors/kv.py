"""KV blocks of a simulated executor by number, and what sessions have left in them. Pure."""

from collections import OrderedDict


class Kv:
    """Blocks that only the last turn of a session holds are given away when they are needed, those of the
    session that was used least recently first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks  # Those that sessions left among them.
        self._left: OrderedDict[str, int] = OrderedDict()  # Blocks by session.
        self._num_left = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, blocks: int) -> None:
        self.num_free -= blocks
        while self._num_left > self.num_free:
            _, freed = self._left.popitem(last=False)
            self._num_left -= freed

    def give(self, blocks: int) -> None:
        self.num_free += blocks

    def cached(self, session: str, most: int) -> int:
        """Tokens of whole blocks that the session has left, of the first `most`."""
        if not session:
            return 0
        return min(self._left.get(session, 0), max(0, most) // self.block_size) * self.block_size

    def claim(self, session: str, tokens: int) -> int:
        """Takes back what was left, so many tokens of it. How many blocks these are."""
        if session not in self._left:
            return 0
        self._num_left -= self._left.pop(session)
        blocks = tokens // self.block_size
        self.take(blocks)
        return blocks

    def leave(self, session: str, tokens: int, blocks: int) -> None:
        """A sequence ends: its whole blocks can be found by the session's next turn."""
        self.num_free += blocks
        if session:
            self._num_left -= self._left.pop(session, 0)
            whole = min(tokens // self.block_size, blocks)
            self._left[session] = whole
            self._num_left += whole
