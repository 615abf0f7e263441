"""Whose turn it is to read: a few readers at each turn of the event loop, in order."""

import asyncio
from collections import deque

# A turn with so many chunks takes less than a millisecond.
READERS_A_TURN = 8


class ReaderLine:
    """Keeps the turns of the event loop short, however many streams have something to write.

    What else waits for the loop gets its turn in between: gRPC takes up one new call in about six turns, so
    while each holds the chunks of hundreds of streams, new ones do not begin. Who stands in the line gathers
    tokens meanwhile.
    """

    def __init__(self) -> None:
        self._ready: deque[tuple[asyncio.Future[None], float]] = deque()  # Each since when.
        self._moves = False

    def join(self, reader: asyncio.Future[None]) -> None:
        """Its result is set when it is its turn."""
        loop = reader.get_loop()
        self._ready.append((reader, loop.time()))
        if not self._moves:
            self._moves = True
            loop.call_soon(self._move)

    def waited_s(self) -> float:
        """How long the first in the line has waited."""
        return asyncio.get_running_loop().time() - self._ready[0][1] if self._ready else 0.0

    def _move(self) -> None:
        for _ in range(min(READERS_A_TURN, len(self._ready))):
            reader, _ = self._ready.popleft()
            if not reader.done():  # The call may be over by now.
                reader.set_result(None)
        self._moves = bool(self._ready)
        if self._moves:
            asyncio.get_running_loop().call_soon(self._move)
