"""An executor comes and goes under a few streams, told of by DNS; `make elastic` has 200, four and a file."""

import asyncio
from collections.abc import Callable

from tests.support.chaos.counting import dispatched
from tests.support.chaos.elastic import Crowd, Load, Scene, place_of
from tests.support.services.cluster import Cluster, wait_until

LOAD = Load(streams=16, tokens=25, step_ms=20, seats=32, interval_s=0.2, slow_start_s=0.2)


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def test_who_comes_serves_and_who_leaves_ends_what_it_has(cluster: Cluster) -> None:
    async with place_of("dns", cluster.folder) as place:
        scene = Scene(cluster, "dns", place, LOAD, executors=2)
        await scene.start(first=1)
        second = scene.executors[1]
        async with Crowd(scene.scheduler, LOAD).asking() as crowd:
            await until(lambda: crowd.answers >= LOAD.streams, "the first executor serves")
            assert dispatched(second) == 0
            scene.tell(2)
            await until(lambda: dispatched(second) >= LOAD.streams, "the second one serves")
            scene.tell(1)
            await until(lambda: f"{second.name}: is gone" in scene.scheduler.log(), "it has left")
            got, answers = dispatched(second), crowd.answers
            await until(lambda: crowd.answers >= answers + 2 * LOAD.streams, "the first one goes on")
            assert dispatched(second) == got
        assert crowd.problems == []
