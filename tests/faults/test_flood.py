"""Hostile clients beside an honest tenant, for a moment; `make fuzz` is longer and judges times."""

from tests.support.flood.run import HOSTILE_TOKEN, MAX_MORE_MB, Seen, run
from tests.support.services.cluster import Cluster

FLOODS = (
    (("huge", "malformed"), "scheduler"),
    (("resets", "streams", "slow"), "scheduler"),
    (("huge", "malformed"), "executor"),
)


async def test_floods_take_little_memory_leave_no_traceback_and_end_no_call(cluster: Cluster) -> None:
    for seen in await run(cluster, FLOODS, seconds=1.0):
        check(seen)


async def test_nor_do_those_of_a_tenant(cluster: Cluster) -> None:
    """Whose large messages are read, and some of whose calls go on."""
    floods = [(["huge"], "scheduler"), (["padded"], "scheduler")]
    for seen in await run(cluster, floods, seconds=1.5, token=HOSTILE_TOKEN):
        check(seen)


def check(seen: Seen) -> None:
    assert seen.kept > 0, seen
    assert seen.tracebacks == 0, seen
    assert seen.peak_mb <= seen.quiet_mb + MAX_MORE_MB, seen
    assert not [each for each in seen.problems if each.startswith("CANCELLED")], seen
