"""The engine on a GPU, steps planned ahead: the tokens of steps in turn, while adapters come and go."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from adapter_store import DiskStore
from tests.support.compilations import compilations
from tests.support.engines import Driver, greedy, make_driver
from tests.support.mixed_dispatches import dispatches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def make(tiny_base: Path, tiny_store: DiskStore) -> Iterator[object]:
    drivers: list[Driver] = []

    def build(**settings: object) -> Driver:
        settings = {"device": "cuda", "dtype": "float32", "host_memory_bytes": 64 << 20} | settings
        settings = {"compile_processes": 1} | settings
        drivers.append(make_driver(str(tiny_base), tiny_store, **settings))
        return drivers[-1]

    yield build
    for driver in drivers:
        driver.engine.close()


@pytest.mark.parametrize("slots", [1, 4])
def test_steps_ahead_bring_the_tokens_of_steps_in_turn(make, digests: list[str], slots: int) -> None:  # type: ignore[no-untyped-def]
    wanted = dispatches(digests)
    runs = {}
    for mode, settings in {"cpu": {"device": "cpu"}, "false": {}, "true": {}}.items():
        driver = make(
            async_scheduling="false" if mode == "cpu" else mode,
            max_loras=slots,
            num_kv_blocks=14,
            max_batched_tokens=16,
            max_seats=12,
            adapter_aging=0.01,
            **settings,
        )
        runs[mode] = driver.run(*wanted)
    assert runs["true"] == runs["false"] == runs["cpu"]


def test_nothing_compiles_once_it_is_ready(make, digests: list[str]) -> None:  # type: ignore[no-untyped-def]
    """All ways of sampling, prompts in chunks, page-ins, preemptions."""
    driver = make(max_loras=2, num_kv_blocks=14, max_batched_tokens=16, max_seats=12, adapter_aging=0.01)
    with compilations() as compiled:
        driver.run(*dispatches(digests))
    assert not compiled


def test_slots_move_under_the_others_without_a_trace(make, digests: list[str]) -> None:  # type: ignore[no-untyped-def]
    """Two adapters decode 200 tokens while the third slot is rewritten in every few steps."""
    running = [greedy(f"{i}", range(3 + i, 20), digest=digests[3 + i], max_new_tokens=200) for i in (0, 1)]
    expected = [make(async_scheduling="false", max_loras=3).run(dispatch)[0] for dispatch in running]
    driver = make(async_scheduling="true", max_loras=3, max_model_len=256)
    for dispatch in running:
        driver.engine.add(dispatch)
    for number in range(60):
        dispatch = greedy(f"short-{number}", range(3, 9), digest=digests[number % 3], max_new_tokens=2)
        driver.engine.add(dispatch)
        driver.until(lambda key=dispatch.key: key in driver.finished)
    driver.until(lambda: len(driver.finished) == 62)
    assert [driver.token_ids(dispatch.key) for dispatch in running] == expected
    assert driver.metric("page_ins_total") > 50
    with closing(driver.engine):
        driver.engine.check()
