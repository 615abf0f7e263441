"""A tenant who takes all that is shared, and one beside it, for a moment; `make bystander` judges times."""

from pathlib import Path

from tests.support.flood.bystander import NOBODY, asks, run
from tests.support.services.cluster import Cluster

# What a machine without a free core, or its own limits, may do to it.
ITS_OWN = ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED: tenant honest")


async def test_what_one_tenant_takes_is_not_taken_from_another(
    cluster: Cluster, adapter: Path, tmp_path: Path
) -> None:
    takers = [way for way in asks(tmp_path) if way != NOBODY]
    async for seen in run(cluster, adapter, takers, seconds=1.5):
        assert 2 * seen.kept > seen.calls > 0, seen
        assert not [each for each in seen.problems if not each.startswith(ITS_OWN)], seen
        assert seen.tracebacks == 0, seen
