"""Two GPUs, NCCL between them: captured steps equal those layer by layer, an engine's answers the CPU's.

Most of the time goes into starts: processes, NCCL, and kernels compiled one after another for each new shape.
So captured and uncaptured steps share one start, of few and small shapes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import DiskStore
from tests.support.engines.driver import Driver, make_driver
from tests.support.engines.mixed_dispatches import dispatches
from tests.support.engines.ranks import rank_pool
from tests.unit.executor.gpu.captured_checks import captured_as_uncaptured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Start = Callable[..., Driver]


def test_captured_collectives_are_the_uncaptured_ones(tmp_path: Path) -> None:
    with rank_pool(2, device="cuda", collective_s=60.0) as pool:
        for dtype, sharded in (("float32", False), ("float32", True), ("bfloat16", True)):
            folder = tmp_path / f"{dtype}-{sharded}"
            folder.mkdir()
            pool.run(2, captured_as_uncaptured, folder, dtype, sharded)


@pytest.fixture
def run_on(tiny_base: Path, store_folder: Path, tiny_store: DiskStore) -> Iterator[Start]:
    """Engines of which only the last one is open: a process has one group."""
    drivers: list[Driver] = []

    def start(**settings: Any) -> Driver:
        while drivers:
            drivers.pop().engine.close()
        settings = {"device": "cuda", "dtype": "float32", "compile_processes": 1} | settings
        drivers.append(make_driver(str(tiny_base), tiny_store, store=str(store_folder), **settings))
        return drivers[-1]

    yield start
    while drivers:
        drivers.pop().engine.close()


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_an_engines_tokens_are_the_cpus(run_on: Start, digests: list[str], sharded: bool) -> None:
    """Few KV blocks and two slots for four adapters: preemptions, page-ins and drawn tokens of every kind."""
    wanted = dispatches(digests)
    common = {"max_loras": 2, "num_kv_blocks": 14, "max_batched_tokens": 16, "max_seats": 12}
    two = {"tensor_parallel_size": 2, "fully_sharded_loras": sharded}
    runs = {
        name: run_on(**common, **settings).run(*wanted)
        for name, settings in {
            "cpu": {"device": "cpu"},
            "in turn": two,
            "ahead": {**two, "async_scheduling": "true"},
        }.items()
    }
    assert runs["ahead"] == runs["in turn"] == runs["cpu"]
