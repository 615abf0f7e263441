"""The event loop's heartbeat: how late the loop is, and a clock that stands still while it does."""

import asyncio
import time
from collections.abc import Callable

BEAT_S = 0.05
# Between two beats at most so much counts as time in which the loop was alive.
MAX_BEAT_S = 2 * BEAT_S


class Heartbeat:
    """Beats on the event loop, from `start` to `stop`.

    Others are waited for on the clock `awake`: what they had no chance to be heard in, since this process was
    stopped, starved or busy, is no time of theirs.
    """

    def __init__(self, lag: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`lag` is told at each beat by how many seconds it came late; `clock` is a monotonic one."""
        self._lag, self._clock = lag, clock
        self._beat_at = clock()
        self._awake_s = 0.0  # At the last beat.
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._beat_at = self._clock()
        self._task = asyncio.create_task(self._run(), name="heartbeat")

    def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def awake(self) -> float:
        """Seconds in which the loop was alive. From any thread, to a beat."""
        return self._awake_s + min(self._clock() - self._beat_at, MAX_BEAT_S)

    def beat(self) -> None:
        """BEAT_S after the last one, or as soon after that as the loop has a turn."""
        now = self._clock()
        self._lag(max(0.0, now - self._beat_at - BEAT_S))
        self._awake_s, self._beat_at = self.awake(), now

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat()
