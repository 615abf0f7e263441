"""Any mixture of requests, in any room: each gets the tokens that it gets alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import DiskStore
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch
from tests.support.engines.driver import MODES, PROMPTS, Driver, greedy, make_driver

Make = Callable[..., Driver]


def mixed(digests: list[str]) -> list[Dispatch]:
    """Ten dispatches, greedy and drawn, over base and adapters; some share prompts."""
    choices = ["", *digests[:4]]
    result = []
    for i in range(10):
        dispatch = greedy(f"d{i}", PROMPTS[i % 4], digest=choices[i % 5], max_new_tokens=6 + i)
        if i % 2:
            dispatch = replace(dispatch, sampling=SamplingParams(temperature=1.0, seed=i))
        result.append(dispatch)
    return result


@pytest.fixture(scope="module")
def alone(tiny_base: Path, tiny_store: DiskStore, digests: list[str]) -> list[list[int]]:
    """Each of `mixed` in an engine of its own."""
    results = []
    for dispatch in mixed(digests):
        driver = make_driver(str(tiny_base), tiny_store, max_loras=1)
        results += driver.run(dispatch)
        driver.engine.close()
    return results


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(10)),
    slots=st.sampled_from([1, 2, 8]),
    chunk=st.sampled_from([10, 16, 64]),
    blocks=st.sampled_from([12, 64]),
    stagger=st.integers(0, 3),
    mode=st.sampled_from(list(MODES.values())),
)
def test_neighbours_slots_chunks_and_preemption_change_no_token(
    tiny_base: Path,
    tiny_store: DiskStore,
    digests: list[str],
    alone: list[list[int]],
    order: list[int],
    slots: int,
    chunk: int,
    blocks: int,
    stagger: int,
    mode: str,
) -> None:
    driver = make_driver(
        str(tiny_base),
        tiny_store,
        max_loras=slots,
        max_batched_tokens=chunk,
        max_seats=10,
        num_kv_blocks=blocks,
        adapter_aging=0.01,
        async_scheduling=mode,
    )
    dispatches = mixed(digests)
    for number in order:
        driver.engine.add(dispatches[number])
        for _ in range(stagger):
            driver.step()
    keys = [dispatch.key for dispatch in dispatches]
    driver.until(lambda: all(key in driver.finished for key in keys))
    driver.engine.close()
    assert [driver.token_ids(key) for key in keys] == alone
    assert driver.engine.batcher.blocks.num_free == blocks
