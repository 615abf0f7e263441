"""Steps planned ahead over several real ranks: the tokens of steps in turn on one, whatever happens."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import DiskStore
from executor.batch.sequence import Dispatch
from tests.support.engines.driver import Driver, make_driver
from tests.support.engines.mixed_dispatches import dispatches

# Two slots for four adapters, and KV blocks for a few of the twelve sequences.
SCARCE = {
    "max_loras": 2, "num_kv_blocks": 14, "max_batched_tokens": 16, "max_seats": 12, "adapter_aging": 0.01,
}  # fmt: skip
NUMBERS = count()


@pytest.fixture(scope="module")
def truth(tiny_base: Path, tiny_store: DiskStore, digests: list[str]) -> list[list[int]]:
    driver = make_driver(str(tiny_base), tiny_store, prefix_cache=False)
    with closing(driver.engine):
        return driver.run(*dispatches(digests))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sharded"])
def ahead(
    request: pytest.FixtureRequest, tiny_base: Path, tiny_store: DiskStore, store_folder: Path
) -> Iterator[Driver]:
    """One for all examples: starting ranks takes longer than what is asked of them."""
    driver = make_driver(
        str(tiny_base), tiny_store, store=str(store_folder), torch_threads=1, async_scheduling="true",
        tensor_parallel_size=2, fully_sharded_loras=request.param, **SCARCE,
    )  # fmt: skip
    with closing(driver.engine):
        yield driver


def named_anew(wanted: list[Dispatch]) -> list[Dispatch]:
    example = next(NUMBERS)
    return [replace(dispatch, key=(0, f"{example}-{dispatch.key[1]}")) for dispatch in wanted]


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(12)),
    pauses=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    cancels=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 11)), max_size=4),
)
def test_the_same_traffic_brings_the_same_tokens(
    ahead: Driver,
    digests: list[str],
    truth: list[list[int]],
    order: list[int],
    pauses: list[int],
    cancels: list[tuple[int, int]],
) -> None:
    wanted, beats, cancelled = named_anew(dispatches(digests)), count(), set()

    def step() -> None:
        beat = next(beats)
        for number in (number for when, number in cancels if when == beat):
            ahead.engine.cancel(wanted[number].key)
            cancelled.add(number)
        ahead.step()

    for pause, number in zip(pauses, order, strict=True):
        ahead.engine.add(wanted[number])
        for _ in range(pause):
            step()
    for _ in range(42):
        step()
    ahead.until(lambda: not ahead.engine.batcher.sequences)
    ahead.until(lambda: not ahead.step().runs)
    assert not ahead.rejected
    assert not ahead.engine.batcher.leaving and not ahead.engine.pager.users()
    for number, dispatch in enumerate(wanted):
        tokens = ahead.token_ids(dispatch.key)
        ended = number not in cancelled or dispatch.key in ahead.finished
        assert tokens == (truth[number] if ended else truth[number][: len(tokens)])


def test_that_traffic_preempts_and_pages(ahead: Driver, digests: list[str], truth: list[list[int]]) -> None:
    """Or the test above would not say much."""
    before = ahead.metric("preemptions_total")
    assert ahead.run(*named_anew(dispatches(digests))) == truth
    assert ahead.metric("preemptions_total") > before
