"""The heartbeat by hand: what counts as lag, and what as time in which the loop was alive."""

import pytest

from scheduler.heartbeat import BEAT_S, MAX_BEAT_S, Heartbeat
from tests.support.services.fakes import ManualClock


def test_a_punctual_loop_is_alive_all_the_time() -> None:
    lags: list[float] = []
    clock = ManualClock(100.0)
    heart = Heartbeat(lags.append, clock)
    for _ in range(20):
        clock.advance(BEAT_S)
        heart.beat()
    assert heart.awake() == pytest.approx(20 * BEAT_S)
    assert lags == pytest.approx([0.0] * 20)


def test_a_pause_is_lag_and_no_time_of_anybody() -> None:
    lags: list[float] = []
    clock = ManualClock()
    heart = Heartbeat(lags.append, clock)
    clock.advance(55.0)
    assert heart.awake() == MAX_BEAT_S  # Who asks before the beat that comes late, too.
    heart.beat()
    assert heart.awake() == MAX_BEAT_S
    assert lags == [55.0 - BEAT_S]
    clock.advance(BEAT_S / 2)
    assert heart.awake() == pytest.approx(MAX_BEAT_S + BEAT_S / 2)


def test_a_starved_loop_ages_more_slowly_than_the_world() -> None:
    clock = ManualClock()
    heart = Heartbeat(lambda lag: None, clock)
    for _ in range(10):
        clock.advance(1.0)
        heart.beat()
    assert heart.awake() == pytest.approx(10 * MAX_BEAT_S)
