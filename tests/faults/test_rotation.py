"""Certificates, tokens and keys change under a few streams of an old client; `make rotation` has 200."""

from tests.support.chaos.rotation import run
from tests.support.services.cluster import Cluster


async def test_no_stream_breaks_and_the_next_call_goes_by_what_is_new(cluster: Cluster) -> None:
    for seen in await run(cluster, streams=16, step_ms=40):
        assert seen.went_on == seen.streams, seen
        assert seen.faults == [] and seen.lost == 0, seen
