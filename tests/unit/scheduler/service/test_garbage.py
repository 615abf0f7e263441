"""A scheduler looks for garbage while it has no request."""

import asyncio
import gc
from collections.abc import Iterator, Mapping

import pytest

from scheduler import __main__ as main
from tests.support.services.scheduler_house import House, generate
from tests.support.services.scheduling import until


@pytest.fixture
def full_collections(house: House) -> Iterator[list[int]]:
    """How many requests were live at each."""
    found: list[int] = []

    def listen(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(house.scheduler.dispatcher.num_live)

    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)  # Python's own rule would often begin one.
    gc.callbacks.append(listen)
    yield found
    gc.callbacks.remove(listen)
    gc.set_threshold(*before)


async def test_no_stream_waits_for_a_full_collection_and_an_idle_scheduler_makes_one(
    house: House, full_collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "COLLECT_INTERVAL_S", 0.01)
    collecting = asyncio.create_task(main._collect_when_idle(house.scheduler))
    await asyncio.sleep(0)
    answers = [asyncio.ensure_future(house.inference.Generate(generate(max_new_tokens=60))) for _ in range(8)]
    await asyncio.gather(*answers)
    seen = len(full_collections)
    much = [[number] for number in range(1000)]  # The last one may have been after the answers.
    await until(lambda: len(full_collections) > seen)
    assert len(much) == 1000
    assert set(full_collections) == {0}
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert (gc.get_threshold(), gc.get_freeze_count()) == ((100, 1, 1), 0)
