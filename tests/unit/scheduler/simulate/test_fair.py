"""Two tenants before a simulated fleet: a hog has its quota, and whoever is told to come again gets in."""

from dataclasses import replace

from scheduler.simulate.fair import HOG, HONEST, SCENARIOS
from scheduler.simulate.requests import End
from scheduler.simulate.run import play
from scheduler.simulate.tenants import ByQuota, Retrying


def test_a_hog_has_its_quota_and_its_retries_get_in() -> None:
    fair = SCENARIOS["requests"]
    fair = replace(fair, fleet=replace(fair.fleet, seconds=12.0, warm_s=0.0))
    gate, callers = ByQuota({HOG: fair.limits}), Retrying(12.0, seed=0)
    played = play(fair.fleet, asked=fair.asked(0, 10.0), gate=gate, callers=callers)
    played.scheduler.check()
    hog = [each for each in played.records if each.asked.tenant == HOG]
    came_in = sum(each.retry_after_s is None for each in hog)
    assert 30 < came_in <= 200 / 60 * (12 + fair.limits.burst_seconds) + 1
    again = [each for each in hog if each.asked.tries]
    assert len(again) > 20
    assert sum(each.retry_after_s is None for each in again) >= 0.95 * len(again)
    honest = [each for each in played.records if each.asked.tenant == HONEST]
    assert all(each.end is End.ANSWERED for each in honest)
