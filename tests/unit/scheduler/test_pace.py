"""Pauses between the chunks of a stream, and what they do to a loop that has more to do than it can."""

from collections import deque
from heapq import heappop, heappush

import pytest

from scheduler.dispatch.reader_line import READERS_A_TURN
from scheduler.event_loop import EVERY_S
from scheduler.pace import MAX_PAUSE_S, USUAL_LAG_S, Pace

STREAMS, EXECUTORS = 1000, 16
CHUNK_S, TOKEN_S = 70e-6, 9e-6  # of a core: about what was measured
TURN_S = 50e-6  # of a turn that has nothing to do


@pytest.mark.parametrize("interval_s", [0.0, 0.2, 0.5])
def test_a_pause_grows_while_the_loop_is_behind_and_is_never_below_its_setting(interval_s: float) -> None:
    pace = Pace(interval_s)
    pauses = [pace.pause_s]
    for lag_s in [2 * USUAL_LAG_S] * 20 + [0.0] * 20:
        pace.adapt(lag_s)
        pauses.append(pace.pause_s)
    assert pauses[0] == pauses[-1] == interval_s
    assert max(pauses) == pauses[20] == max(interval_s, MAX_PAUSE_S)
    assert pauses[:21] == sorted(pauses[:21]) and pauses[20:] == sorted(pauses[20:], reverse=True)


def test_one_long_standstill_hardly_counts() -> None:
    pace = Pace(0.0)
    for _ in range(10):
        pace.adapt(0.001)
    pace.adapt(60.0)
    assert 0 < pace.pause_s < 0.04


class Loop:
    """An event loop on virtual time. A turn takes one message of each executor, and some chunks of those that
    stand in line."""

    def __init__(self, asked: int, interval_s: float) -> None:
        self.step_s = STREAMS / asked
        self.now = self.beat = 0.0
        self.written = self.chunks = 0
        self.pace = Pace(interval_s)
        self.steps = [0] * EXECUTORS
        self.gathered = [0] * STREAMS
        self.idle = [True] * STREAMS
        self.paused = list[tuple[float, int]]()
        self.line = deque[tuple[int, float]]()

    def turn(self) -> None:
        start = self.now
        while self.paused and self.paused[0][0] <= start:
            self.ready(heappop(self.paused)[1])
        for executor in range(EXECUTORS):
            if int(self.now / self.step_s - executor / EXECUTORS) > self.steps[executor]:
                self.steps[executor] += 1
                for stream in range(executor, STREAMS, EXECUTORS):
                    self.gathered[stream] += 1
                    self.now += TOKEN_S
                    if self.idle[stream]:
                        self.ready(stream)
        for _ in range(min(READERS_A_TURN, len(self.line))):
            stream, _ = self.line.popleft()
            self.now += CHUNK_S
            self.written += self.gathered[stream]
            self.chunks += 1
            self.gathered[stream] = 0
            heappush(self.paused, (self.now + self.pace.pause_s, stream))
        if self.now >= self.beat:
            self.pace.adapt(self.now - self.line[0][1] if self.line else 0.0)
            self.beat = self.now + EVERY_S
        self.now = max(self.now, start + TURN_S)

    def ready(self, stream: int) -> None:
        self.idle[stream] = not self.gathered[stream]
        if self.gathered[stream]:
            self.line.append((stream, self.now))


@pytest.mark.parametrize("interval_s", [0.0, 0.2])
def test_throughput_never_falls_when_more_is_asked(interval_s: float) -> None:
    """And all of it is delivered far beyond what one chunk a token would allow: 12,600 tokens a second."""
    for asked in (4_000, 12_000, 24_000, 48_000):
        loop = Loop(asked, interval_s)
        while loop.now < 1.0:
            loop.turn()
        begun, written, chunks = loop.now, loop.written, loop.chunks
        while loop.now < 2.0:
            loop.turn()
        written, chunks = loop.written - written, loop.chunks - chunks
        assert written / (loop.now - begun) == pytest.approx(asked, rel=0.1)
        if asked == 4_000 and not interval_s:
            assert written == chunks


def test_streams_that_begin_while_the_loop_is_behind_lengthen_the_pauses_of_all() -> None:
    pace = Pace(0.0)
    pace.begins()
    assert pace.pause_s == 0
    pace.adapt(2 * USUAL_LAG_S)
    for _ in range(20):
        pace.begins()
    assert pace.pause_s == MAX_PAUSE_S
