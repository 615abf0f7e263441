"""Every configuration fits a multiprocessor and covers its layer."""

from itertools import product

import pytest

from kernels.launching.moe_tuning import ALIGNED, OnceConfig, block_size, choose, gemm_block_size, gemm_config
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta


@pytest.mark.parametrize("element_size", [2, 4])
def test_pairs_fit(element_size: int) -> None:
    for rows, blocks, slices, width, rank in product(
        (1, 16), (1, 16, 72, 128, 320, 5000), (1, 2, 3), (16, 768, 2048, 14336), (8, 16, 32, 64)
    ):
        config = choose(rows, blocks, slices, width, 64, rank, element_size)
        if isinstance(config, OnceConfig):
            assert (rows, rank, element_size) == (16, 64, 2)
            tile = config.block_k * (rows + 64) * element_size * config.num_stages
            assert tile <= 227 * 1024
            continue
        assert config.block_k & (config.block_k - 1) == 0
        assert config.block_k >= 16
        if rows == 1:
            assert config.block_k * config.split >= width
            # float32 products of a tile in registers
            assert config.block_rank * config.block_k <= 32 * 1024
        else:
            columns = config.block_rank * (slices if config.fused else 1)
            assert config.block_k * (rows + columns) * element_size * config.shrink_stages <= 227 * 1024
            assert 1 <= config.split <= max(1, width // config.block_k)


def test_a_plan_of_single_rows_is_for_many_adapters() -> None:
    """A graph is captured with all rows on one slot, and replayed with others."""
    meta, sizes = LoRAKernelMeta.make(64, 64, "cpu"), []
    for rows_per_item in (1, 16):
        meta.prepare_tensors([(0, 64)], LaunchPlan.for_graph(64, 64, rows_per_item=rows_per_item))
        sizes.append(block_size(meta, topk=2, num_experts=8))
    assert sizes == [1, ALIGNED]


@pytest.mark.parametrize("pairs", [1, 16, 500, 4000, 100_000])
def test_products_fit(pairs: int) -> None:
    for element_size in (2, 4):
        size = gemm_block_size(pairs, 8)
        config = gemm_config(size, element_size)
        assert config.rows >= size
        tile = config.block_k * (config.rows + config.block_n) * element_size
        assert tile * config.num_stages <= 227 * 1024
