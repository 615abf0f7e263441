"""The scheduler's gate before a simulated fleet, at twice what that can do."""

from dataclasses import replace

from scheduler.simulate.deadlines import ByEstimate, compare
from scheduler.simulate.run import play
from scheduler.simulate.scenarios import SCENARIOS
from scheduler.simulate.traffic import Traffic

HALF = replace(SCENARIOS["deadlines-one"], executors=1, seconds=50.0, warm_s=20.0)
SMALL = replace(HALF, traffic=Traffic(60.0, popularity="one", deadline_s=(6.0, 6.0)))


def test_refusing_what_would_be_late_leaves_more_time_for_what_is_not() -> None:
    row = compare(SMALL, seed=1)
    assert row["refused"] > 0
    assert row["refused_would_have_missed"] >= 0.9
    assert row["goodput_tokens_s"] >= 1.3 * row["goodput_tokens_s_without"]
    assert row["missed"] < 0.2 * (row["requests"] - row["refused"])


def test_nobody_is_refused_below_capacity() -> None:
    calm, gate = SMALL.at_rate(20.0), ByEstimate()
    played = play(calm, gate=gate, watcher=gate)
    row = played.row()
    assert row["refused"] == row["missed"] == 0
    assert row["answered"] == row["requests"]
    played.scheduler.check()
