"""The suite of test_parallel_layers.py over NCCL, one GPU a rank, with the Triton kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.engines.ranks import RankPool, rank_pool
from tests.unit.executor.lora import rank_checks
from tests.unit.executor.lora.layer_cases import CASES

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
SIZES = (1, *(size for size in (2, 4) if size <= GPUS))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    with rank_pool(*SIZES, device="cuda") as ranks:
        yield ranks


@pytest.mark.parametrize("size", SIZES)
def test_collectives(pool: RankPool, size: int) -> None:
    pool.run(size, rank_checks.collectives, "cuda")


@pytest.mark.parametrize("fully_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", rank_checks.EVERY_CHECK, ids=lambda check: check.__name__)
def test_equals_the_unsharded_layer(
    pool: RankPool, check: Callable[..., None], name: str, size: int, fully_sharded: bool
) -> None:
    pool.run(size, check, (name, fully_sharded), "cuda")
