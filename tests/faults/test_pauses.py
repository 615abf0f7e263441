"""A scheduler dies or stands still under streams with known answers; `make chaos` does it for long."""

from tests.support.chaos.pauses import Load, run
from tests.support.services.cluster import Cluster


async def test_no_stream_is_lost_repeated_or_wrong(cluster: Cluster) -> None:
    """Of two schedulers one is disturbed; a pause is longer than executors may be silent."""
    load = Load(20, tokens=40, executors=1, schedulers=2, step_ms=30, pause_s=3.0, report_timeout_s=2.5)
    for seen in await run(cluster, load, ("kill", "stop")):
        assert (seen.whole, seen.late_whole, seen.problems) == (seen.streams, seen.late, {})
        assert seen.hung == 0, seen.way
