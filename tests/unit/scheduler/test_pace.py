"""Pauses between the chunks of a stream, and what they do to a loop that has more to do than it can."""

import pytest

from scheduler.loop_turns import EVERY_S
from scheduler.pace import MAX_PAUSE_S, USUAL_TURN_S, Pace

STREAMS, EXECUTORS = 1000, 16
CHUNK_S, TOKEN_S = 70e-6, 9e-6  # of a core: about what was measured


@pytest.mark.parametrize("interval_s", [0.0, 0.2, 0.5])
def test_a_pause_grows_with_long_turns_and_is_never_below_its_setting(interval_s: float) -> None:
    pace = Pace(interval_s)
    pauses = [pace.pause_s]
    for turn_s in [2 * USUAL_TURN_S] * 20 + [0.0] * 20:
        pace.adapt(turn_s)
        pauses.append(pace.pause_s)
    assert pauses[0] == pauses[-1] == interval_s
    assert max(pauses) == pauses[20] == max(interval_s, MAX_PAUSE_S)
    assert pauses[:21] == sorted(pauses[:21]) and pauses[20:] == sorted(pauses[20:], reverse=True)


def test_one_long_turn_hardly_counts() -> None:
    pace = Pace(0.0)
    for _ in range(10):
        pace.adapt(0.001)
    pace.adapt(60.0)
    assert 0 < pace.pause_s < 0.04


class Loop:
    """An event loop on virtual time. A turn takes one message of each executor, and writes what is due."""

    def __init__(self, asked: int, interval_s: float) -> None:
        self.step_s = STREAMS / asked
        self.now = self.beat = 0.0
        self.written = self.chunks = 0
        self.pace = Pace(interval_s)
        self.steps = [0] * EXECUTORS
        self.gathered = [0] * STREAMS
        self.due = [0.0] * STREAMS

    def turn(self) -> None:
        start = self.now
        for executor in range(EXECUTORS):
            made = int(self.now / self.step_s - executor / EXECUTORS)
            if made > self.steps[executor]:
                self.steps[executor] += 1
                for stream in range(executor, STREAMS, EXECUTORS):
                    self.gathered[stream] += 1
                    self.now += TOKEN_S
        for stream, count in enumerate(self.gathered):
            if count and self.due[stream] <= self.now:
                self.now += CHUNK_S
                self.written += count
                self.chunks += 1
                self.gathered[stream] = 0
                self.due[stream] = self.now + self.pace.pause_s
        if self.now >= self.beat:
            self.pace.adapt(self.now - start)
            self.beat = self.now + EVERY_S
        self.now = max(self.now, start + 0.002)


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
