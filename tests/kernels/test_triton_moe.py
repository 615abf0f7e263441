"""The expert kernels against the reference, in every form that a step can take."""

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.fused_moe_lora import fused_moe_lora, unaligned_blocks
from kernels.launching.moe_blocks import MoEBlocks
from kernels.launching.moe_tuning import OnceConfig, PairConfig
from kernels.metadata.meta import LoRAKernelMeta, LoRAMapping
from kernels.metadata.work_list import Run
from kernels.moe_lora_align import moe_lora_align_block_size
from kernels.punica import PunicaWrapperCPU
from kernels.punica_gpu import PunicaWrapperGPU
from tests.kernels.moe_stack import ExpertStack, make_expert_stack, random_choices
from tests.kernels.stack import DEVICE, DTYPES

EXPERTS, TOPK, ROWS = 3, 2, 16
RUNS: list[Run] = [(2, 5), (-1, 2), (0, 5), (2, 1), (3, 3)]
CONFIGS = {
    "pair": PairConfig(16, 32, 2, False, 4, 2, 32, 4),
    "pair, slices fused": PairConfig(16, 64, 1, True, 4, 2, 32, 4),
    "once": OnceConfig(64, 16, 2, 4, 2, 1),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def ranks_up_to(highest: int, slices: int = 2) -> Tensor:
    """All ranks occur; slot 1 has no rows, slot 3 nothing in the second slice."""
    ranks = torch.arange(slices * 4 * EXPERTS, dtype=torch.int32).view(slices, 4, EXPERTS) * 7 % (highest + 1)
    ranks[1, 3] = 0
    return ranks


def reference(stack: ExpertStack, y: Tensor, x: Tensor, choices: Tensor, **options: object) -> Tensor:
    punica = PunicaWrapperCPU(4, 64)
    punica.update_metadata(LoRAMapping(tuple(RUNS), ()))
    out, blocks = y.clone(), punica.moe_lora_align_block_size(choices, EXPERTS)
    tables = stack.ranks, stack.scales, stack.column_starts
    punica.add_lora_fused_moe(out, x, stack.lora_a, stack.lora_b, *tables, blocks, **options)
    return out


def meta_of(runs: list[Run] = RUNS) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(4, 64, DEVICE)
    meta.prepare_tensors(runs)
    return meta


def blocks_of(size: int, choices: Tensor, meta: LoRAKernelMeta) -> MoEBlocks:
    if size == 0:
        return unaligned_blocks(choices.to(DEVICE), EXPERTS, meta)
    return moe_lora_align_block_size(choices.to(DEVICE), EXPERTS, size, meta)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(0, DTYPES[-1]), *((4, dtype) for dtype in DTYPES), (32, DTYPES[-1])],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_forms(config: PairConfig | OnceConfig, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = make_expert_stack(ranks_up_to(12), 75, [40, 21], 12, dtype)
    there, choices = stack.to(DEVICE), random_choices(ROWS, TOPK, EXPERTS)
    x, y = torch.randn(ROWS, 75).to(dtype), torch.randn(ROWS * TOPK, stack.columns).to(dtype)
    got = y.to(DEVICE, copy=True)
    fused_moe_lora(
        got, x.to(DEVICE), there.lora_a, there.lora_b, there.ranks, there.scales, there.column_starts,
        blocks_of(size, choices, meta_of()), config=config,
    )  # fmt: skip
    wanted = reference(stack, y, x, choices)
    torch.testing.assert_close(got.cpu(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [0, 4], ids=["unaligned", "4 pairs"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fp8_weights_count_as_the_numbers_that_they_are(
    config: PairConfig | OnceConfig, fp8: torch.dtype, size: int
) -> None:
    """With NaN in every byte that must not be read."""
    torch.manual_seed(0)
    stack = make_expert_stack(ranks_up_to(20), 75, [40, 21], 20).to("cpu", fp8)
    there, choices = stack.to(DEVICE), random_choices(ROWS, TOPK, EXPERTS)
    x, y = torch.randn(ROWS, 75).half(), torch.randn(ROWS * TOPK, stack.columns).half()
    got = y.to(DEVICE, copy=True)
    fused_moe_lora(
        got, x.to(DEVICE), there.lora_a, there.lora_b, there.ranks, there.scales, there.column_starts,
        blocks_of(size, choices, meta_of()), config=config,
    )  # fmt: skip
    wanted = reference(stack, y, x, choices)
    assert not wanted.isnan().any()
    torch.testing.assert_close(got.cpu(), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("add_inputs", [True, False], ids=["", "overwrite"])
@pytest.mark.parametrize("size", [0, 16], ids=["unaligned", "16 pairs"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_second_product(config: PairConfig | OnceConfig, size: int, add_inputs: bool) -> None:
    """x by pair, routed weights, rank above one tile where the form serves it."""
    torch.manual_seed(0)
    stack = make_expert_stack(ranks_up_to(40, slices=3), 33, [30, 50, 7], 40)
    there, choices = stack.to(DEVICE), random_choices(ROWS, TOPK, EXPERTS)
    x, y = torch.randn(ROWS * TOPK, 33), torch.randn(ROWS * TOPK, stack.columns)
    weights, got = torch.rand(ROWS, TOPK), y.to(DEVICE, copy=True)
    fused_moe_lora(
        got, x.to(DEVICE), there.lora_a, there.lora_b, there.ranks, there.scales, there.column_starts,
        blocks_of(size, choices, meta_of()), routed_weights=weights.to(DEVICE), add_inputs=add_inputs,
        config=config,
    )  # fmt: skip
    wanted = reference(stack, y, x, choices, routed_weights=weights, add_inputs=add_inputs)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, ROWS], ids=["few pairs", "many pairs"])
def test_the_wrapper_with_experts_elsewhere(rows: int) -> None:
    torch.manual_seed(0)
    runs = RUNS if rows == ROWS else [(2, 1), (-1, 1), (0, 1)]
    expert_map = torch.tensor([1, -1, 0, -1, -1, 2, -1, -1], dtype=torch.int32)
    stack, choices = make_expert_stack(ranks_up_to(8), 24, [16, 9], 8), random_choices(rows, TOPK, 8)
    x, y = torch.randn(rows, 24), torch.randn(rows * TOPK, stack.columns)
    results = []
    for wrapper, device in ((PunicaWrapperCPU, "cpu"), (PunicaWrapperGPU, DEVICE)):
        punica, there, out = wrapper(4, 64, device), stack.to(device), y.to(device, copy=True)
        punica.update_metadata(LoRAMapping(tuple(runs), ()))
        for _ in range(2):
            blocks = punica.moe_lora_align_block_size(
                choices.to(device), EXPERTS, expert_map=expert_map.to(device)
            )
            tables = there.ranks, there.scales, there.column_starts
            punica.add_lora_fused_moe(out, x.to(device), there.lora_a, there.lora_b, *tables, blocks)
        results.append(out.cpu())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not torch.equal(results[1], y)


def test_a_base_only_step_changes_nothing() -> None:
    stack, punica = (
        make_expert_stack(ranks_up_to(8), 24, [16, 9], 8).to(DEVICE),
        PunicaWrapperGPU(4, 64, DEVICE),
    )
    y = torch.ones(4 * TOPK, stack.columns, device=DEVICE)
    punica.update_metadata(LoRAMapping(((-1, 4),), ()))
    blocks = punica.moe_lora_align_block_size(random_choices(4, TOPK, EXPERTS).to(DEVICE), EXPERTS)
    tables, x = (stack.ranks, stack.scales, stack.column_starts), torch.ones(4, 24, device=DEVICE)
    punica.add_lora_fused_moe(y, x, stack.lora_a, stack.lora_b, *tables, blocks)
    assert (y == 1).all()


@pytest.mark.parametrize("argument", ["x", "lora_a[1]", "lora_b[1]", "y", "config"])
def test_what_the_kernels_cannot_follow_is_named(argument: str) -> None:
    stack = make_expert_stack(ranks_up_to(100), 24, [16, 9], 100).to(DEVICE)
    meta, choices = meta_of(), random_choices(ROWS, TOPK, EXPERTS)
    x, y = torch.ones(ROWS, 24, device=DEVICE), torch.ones(ROWS * TOPK, stack.columns, device=DEVICE)
    a, b = list(stack.lora_a), list(stack.lora_b)
    config = CONFIGS["once" if argument == "config" else "pair"]
    if argument == "x":
        x = x.half()
    elif argument == "y":
        y = y.T.contiguous().T
    elif argument == "lora_a[1]":
        a[1] = a[1].contiguous()
    elif argument == "lora_b[1]":
        b[1] = b[1].half()
    with pytest.raises(KernelArgumentError) as caught:
        fused_moe_lora(
            y, x, a, b, stack.ranks, stack.scales, stack.column_starts,
            blocks_of(16, choices, meta), config=config,
        )  # fmt: skip
    assert caught.value.argument == argument


@pytest.mark.parametrize("config", ["pair", "once"])
def test_slot_and_pair_products_beyond_32_bits(config: str) -> None:
    """Every stride is below 2^31, slot x stride and pair x stride are not. Untouched pages cost no memory."""
    torch.manual_seed(0)
    slots, stride, width = 4, 2**31 // 3 + 8, 32
    assert stride < 2**31 < (slots - 1) * stride
    arena = torch.empty(slots * stride, dtype=torch.float16, device=DEVICE)
    strides = stride, 4 * width, width, 1
    a, b = (arena.as_strided((slots, 2, 4, width), strides, offset) for offset in (0, 8 * width))
    table = torch.empty(slots * stride, dtype=torch.int32, device=DEVICE)
    ranks = table.as_strided((1, slots, 2), (1, stride, 1))
    y = torch.empty(4 * stride, dtype=torch.float16, device=DEVICE).as_strided((4, width), (stride, 1))
    for tensor in (a[3], b[3], y[3]):
        tensor.copy_(torch.randn(tensor.shape))
    ranks[0] = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 4]])
    x, before = torch.randn(4, width, device=DEVICE).half(), y[3].double()
    meta, choices = meta_of([(0, 2), (-1, 1), (3, 1)]), torch.ones(4, 1, dtype=torch.int32, device=DEVICE)
    for blocks in (unaligned_blocks(choices, 2, meta), moe_lora_align_block_size(choices, 2, 16, meta)):
        y[3] = before.half()
        scales = torch.ones(1, slots, 2, device=DEVICE)
        fused_moe_lora(y, x, [a], [b], ranks, scales, [0], blocks, config=CONFIGS[config])
        wanted = before + (a[3, 1].double() @ x[3].double()) @ b[3, 1].double()
        torch.testing.assert_close(y[3].double(), wanted, rtol=2e-3, atol=2e-2)


def test_impossible_choices_and_entries_are_ignored() -> None:
    stack = make_expert_stack(ranks_up_to(8), 24, [16, 9], 8).to(DEVICE)
    meta, choices = meta_of(), random_choices(ROWS, TOPK, EXPERTS).to(DEVICE)
    choices[:3] = torch.tensor([[-5, 10**6], [EXPERTS, 2**31 - 1], [-(2**31), -1]], device=DEVICE)
    x, tables = torch.ones(ROWS, 24, device=DEVICE), (stack.ranks, stack.scales, stack.column_starts)
    for blocks in (
        unaligned_blocks(choices, EXPERTS, meta),
        moe_lora_align_block_size(choices, EXPERTS, 4, meta),
    ):
        y = torch.ones(ROWS * TOPK, stack.columns, device=DEVICE)
        if blocks.aligned:
            blocks.blocks[0, 0], blocks.blocks[1, 1], blocks.blocks[2, 2] = 10**6, -7, 10**6
        fused_moe_lora(y, x, stack.lora_a, stack.lora_b, *tables, blocks, config=CONFIGS["pair"])
        assert (y[: 3 * TOPK] == 1).all()
