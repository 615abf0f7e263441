"""A hog at ten times its quota for a moment, at two schedulers; `make fairness` judges times."""

from pathlib import Path

from tests.support.flood.fairness import TOLD, measured
from tests.support.services.cluster import Cluster
from tests.support.stores.redis_server import RedisServer


async def test_a_hog_has_its_quota_and_the_honest_tenant_all_it_asks_for(model: Path, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, Cluster(model, tmp_path, store_url=redis.url) as cluster:
        [seen] = await measured(cluster, 2, [TOLD], seconds=2.5)
    assert seen.asked > 0 and seen.hog_asked > seen.allowed
    assert seen.faults() == []  # Nobody was lost, the honest tenant not refused, the hog within its quota.
    assert seen.refusals > 0 and seen.retries_kept >= 0.8 * seen.retries > 0, seen
