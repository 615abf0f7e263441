"""The base model's expert product against the reference."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.launching.moe_tuning import GemmConfig
from kernels.moe_gemm import moe_gemm
from kernels.moe_lora_align import moe_align_block_size
from kernels.reference import moe_gemm as reference
from kernels.reference import moe_lora_align as reference_align
from tests.kernels.moe_stack import random_choices
from tests.kernels.stack import DEVICE

EXPERTS, ROWS, TOPK = 4, 12, 2


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "experts elsewhere"])
@pytest.mark.parametrize("x_rows", [ROWS, ROWS * TOPK], ids=["x by row", "x by pair"])
def test_product(x_rows: int, elsewhere: bool) -> None:
    torch.manual_seed(0)
    choices, weights = random_choices(ROWS, TOPK, EXPERTS), torch.rand(ROWS, TOPK)
    expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32) if elsewhere else None
    experts = 3 if elsewhere else EXPERTS
    x, w, bias = torch.randn(x_rows, 50), torch.randn(experts, 35, 50), torch.randn(experts, 35)
    wanted, got = torch.full((2, ROWS * TOPK, 35), torch.nan)
    blocks = reference_align.moe_align_block_size(choices, experts, 16, expert_map=expert_map)
    reference.moe_gemm(wanted, x, w, blocks, bias=bias, routed_weights=weights)
    there = None if expert_map is None else expert_map.to(DEVICE)
    blocks, got = moe_align_block_size(choices.to(DEVICE), experts, 16, expert_map=there), got.to(DEVICE)
    moe_gemm(
        got, x.to(DEVICE), w.to(DEVICE), blocks, bias=bias.to(DEVICE), routed_weights=weights.to(DEVICE),
        config=GemmConfig(16, 16, 32, 4, 2),
    )  # fmt: skip
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_blocks_must_fit_the_configuration() -> None:
    blocks = moe_align_block_size(random_choices(ROWS, TOPK, EXPERTS).to(DEVICE), EXPERTS, 32)
    x, y = torch.zeros(ROWS, 8, device=DEVICE), torch.zeros(ROWS * TOPK, 8, device=DEVICE)
    with pytest.raises(KernelArgumentError, match=r"^config is for blocks of 16 pairs"):
        moe_gemm(y, x, torch.zeros(EXPERTS, 8, 8, device=DEVICE), blocks, config=GemmConfig(16, 16, 32, 4, 2))
