"""The suite of test_expert_layers.py over NCCL, one GPU a rank, with the Triton kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.engines.ranks import RankPool, rank_pool
from tests.unit.executor.lora import expert_checks
from tests.unit.executor.lora.expert_checks import FORMS

GPUS = torch.cuda.device_count()
SIZES = (1, *(size for size in (2, 4) if size <= GPUS))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(*SIZES, device="cuda") as ranks:
        yield ranks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check", expert_checks.EVERY_CHECK, ids=lambda check: check.__name__)
def test_equals_the_whole_layer(pool: RankPool, check: Callable[..., None], form: str, size: int) -> None:
    pool.run(size, expert_checks.on_gpu, check, form)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if len(form.names) == 3])
def test_one_pair_for_gate_and_up(pool: RankPool, form: str, size: int) -> None:
    pool.run(size, expert_checks.on_gpu, expert_checks.one_pair_for_gate_and_up, form)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.fully_sharded])
def test_fp8_slots(pool: RankPool, form: str, size: int) -> None:
    pool.run(size, expert_checks.on_gpu, expert_checks.fp8_slots, form)
