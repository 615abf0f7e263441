"""The engine on a GPU, steps planned ahead: the tokens of steps in turn, while adapters come and go."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import DiskStore
from tests.support.engines.compilations import compilations
from tests.support.engines.driver import PROMPTS, Driver, greedy, make_driver
from tests.support.engines.mixed_dispatches import dispatches
from tests.unit.executor.loading_checks import twenty_loads_leave_sixteen_streams_alone

Make = Callable[..., Driver]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def make(tiny_base: Path, tiny_store: DiskStore) -> Iterator[Make]:
    drivers: list[Driver] = []

    def build(**settings: Any) -> Driver:
        settings = {"device": "cuda", "dtype": "float32", "host_memory_bytes": 64 << 20} | settings
        settings = {"compile_processes": 1} | settings
        drivers.append(make_driver(str(tiny_base), tiny_store, **settings))
        return drivers[-1]

    yield build
    for driver in drivers:
        driver.engine.close()


@pytest.mark.parametrize("slots", [1, 4])
def test_steps_ahead_bring_the_tokens_of_steps_in_turn(make: Make, digests: list[str], slots: int) -> None:
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


def test_nothing_compiles_once_it_is_ready(make: Make, digests: list[str]) -> None:
    """All ways of sampling, prompts in chunks, page-ins, preemptions."""
    driver = make(max_loras=2, num_kv_blocks=14, max_batched_tokens=16, max_seats=12, adapter_aging=0.01)
    with compilations() as compiled:
        driver.run(*dispatches(digests))
    assert not compiled


def test_slots_move_under_the_others_without_a_trace(make: Make, digests: list[str]) -> None:
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


def test_captured_steps_bring_the_tokens_of_uncaptured_ones(
    make: Make, digests: list[str], strangers: list[str]
) -> None:
    """Eight streams of one adapter, of eight, of three beside the base; then eight that end one by one."""
    eight = [*digests, *strangers[:3]]
    batches = [
        [(digest, 12) for digest in [eight[3]] * 8],
        [(digest, 12) for digest in eight],
        [(digest, 12) for digest in ("", eight[0], eight[4], eight[4], "", eight[2], eight[0], eight[2])],
        [(digest, 4 + 6 * number) for number, digest in enumerate(eight)],  # 200 tokens
    ]
    runs = []
    for captured in (True, False):
        driver = make(max_loras=8, max_seats=8, num_kv_blocks=128, cuda_graphs=captured)
        runs.append(
            [
                driver.run(
                    *(
                        greedy(f"{batch}-{n}", PROMPTS[n % 4], digest=digest, max_new_tokens=count)
                        for n, (digest, count) in enumerate(streams)
                    )
                )
                for batch, streams in enumerate(batches)
            ]
        )
    assert runs[0] == runs[1]
    assert sum(map(len, runs[0][3])) == 200


def test_twenty_loads_some_of_them_broken_leave_sixteen_streams_alone(
    make: Make, digests: list[str], strangers: list[str]
) -> None:
    both = {"num_kv_blocks": 256, "max_seats": 36}
    alone = {**both, "async_scheduling": "false", "max_loras": 4}
    crowded = {**both, "async_scheduling": "true", "max_loras": 5}
    twenty_loads_leave_sixteen_streams_alone(make, alone, crowded, digests, strangers, num_tokens=80)
