"""Every class with LoRA on 1, 2 and 4 ranks equals the unsharded layer; with 4, KV heads are fewer than
ranks."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.engines.ranks import RankPool, rank_pool
from tests.unit.executor.lora import rank_checks
from tests.unit.executor.lora.layer_cases import CASES

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(*SIZES) as ranks:
        yield ranks


@pytest.mark.parametrize("size", SIZES)
def test_collectives(pool: RankPool, size: int) -> None:
    pool.run(size, rank_checks.collectives)


@pytest.mark.parametrize("fully_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", rank_checks.EVERY_CHECK, ids=lambda check: check.__name__)
def test_equals_the_unsharded_layer(
    pool: RankPool, check: Callable[..., None], name: str, size: int, fully_sharded: bool
) -> None:
    pool.run(size, check, (name, fully_sharded))


@pytest.mark.parametrize("name", CASES)
def test_no_image_fits_another_rank_size_or_sharding(pool: RankPool, name: str) -> None:
    every = [
        layout
        for size in SIZES
        for sharded in (False, True)
        for layout, _ in pool.run(size, rank_checks.layouts, (name, sharded))
    ]
    assert len(set(every)) == len(every) == 2 * sum(SIZES)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sharded_class])
def test_sharding_makes_slots_smaller(pool: RankPool, name: str) -> None:
    plain = [elements for _, elements in pool.run(4, rank_checks.layouts, (name, False))]
    sharded = [elements for _, elements in pool.run(4, rank_checks.layouts, (name, True))]
    assert all(less < more for less, more in zip(sharded, plain, strict=True))
