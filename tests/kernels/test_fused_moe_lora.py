"""Per-expert LoRA against the answer pair by pair, through the wrapper's methods."""

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.expert_product import align_experts, expert_product
from kernels.metadata.meta import LoRAMapping
from kernels.metadata.work_list import Run
from kernels.punica import PunicaWrapperCPU
from tests.kernels.moe_stack import ExpertStack, make_expert_stack, random_choices
from tests.kernels.stack import row_slots

EXPERTS, TOPK = 5, 2
RUNS: list[Run] = [(2, 5), (-1, 2), (0, 9), (2, 1), (3, 1)]
ROWS = 18


def stack() -> ExpertStack:
    """Some experts without LoRA, every rank up to the highest; slot 1 has no rows, slot 3 no second slice."""
    ranks = torch.arange(2 * 4 * EXPERTS, dtype=torch.int32).view(2, 4, EXPERTS) % 9
    ranks[1, 3] = 0
    return make_expert_stack(ranks, 24, [16, 9], max_rank=8)


def wrapper(runs: list[Run] = RUNS) -> PunicaWrapperCPU:
    punica = PunicaWrapperCPU(4, 64)
    punica.update_metadata(LoRAMapping(tuple(runs), ()))
    return punica


def expected(given: ExpertStack, y: Tensor, x: Tensor, choices: Tensor, weights: Tensor | None) -> Tensor:
    slots, out = row_slots(RUNS), y.double()
    for pair, expert in enumerate(choices.flatten().tolist()):
        row = pair // TOPK
        delta = given.delta(x[pair if len(x) == len(y) else row], slots[row], expert)
        out[pair] += delta if weights is None else delta * weights[row, pair % TOPK].double()
    return out


@pytest.mark.parametrize("routed", [False, True], ids=["", "routed"])
@pytest.mark.parametrize("x_rows", [ROWS, ROWS * TOPK], ids=["x by row", "x by pair"])
def test_every_pair_gets_its_adapters_delta_for_its_expert(x_rows: int, routed: bool) -> None:
    torch.manual_seed(0)
    given, choices = stack(), random_choices(ROWS, TOPK, EXPERTS)
    x, y = torch.randn(x_rows, 24), torch.randn(ROWS * TOPK, given.columns)
    weights = torch.rand(ROWS, TOPK) if routed else None
    wanted, punica = expected(given, y, x, choices, weights), wrapper()
    blocks = punica.moe_lora_align_block_size(choices, EXPERTS)
    punica.add_lora_fused_moe(
        y, x, given.lora_a, given.lora_b, given.ranks, given.scales, given.column_starts, blocks,
        routed_weights=weights,
    )  # fmt: skip
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_rank_table_of_slots_only_may_be_expanded_over_the_experts() -> None:
    torch.manual_seed(0)
    ranks = torch.tensor([[[3], [0], [8], [5]]], dtype=torch.int32).expand(1, 4, EXPERTS)
    given, choices = make_expert_stack(ranks, 24, [16], 8), random_choices(ROWS, TOPK, EXPERTS)
    x, y, punica = torch.randn(ROWS, 24), torch.zeros(ROWS * TOPK, given.columns), wrapper()
    wanted = expected(given, y, x, choices, None)
    blocks = punica.moe_lora_align_block_size(choices, EXPERTS)
    tables = ranks, given.scales
    punica.add_lora_fused_moe(y, x, given.lora_a, given.lora_b, *tables, given.column_starts, blocks)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def test_overwriting_leaves_other_pairs_and_columns() -> None:
    torch.manual_seed(0)
    given, choices = stack(), random_choices(ROWS, TOPK, EXPERTS)
    x, y, punica = torch.randn(ROWS, 24), torch.full((ROWS * TOPK, given.columns), 7.0), wrapper()
    wanted = expected(given, torch.zeros_like(y), x, choices, None)
    blocks = punica.moe_lora_align_block_size(choices, EXPERTS)
    punica.add_lora_fused_moe(
        y, x, given.lora_a, given.lora_b, given.ranks, given.scales, given.column_starts, blocks,
        add_inputs=False,
    )  # fmt: skip
    adapter_pairs = torch.tensor(row_slots(RUNS)).repeat_interleave(TOPK) >= 0
    columns = torch.zeros(given.columns, dtype=torch.bool)
    for start, weight in zip(given.column_starts, given.lora_b, strict=True):
        columns[start : start + weight.shape[3]] = True
    assert (y[~adapter_pairs] == 7).all()
    assert (y[:, ~columns] == 7).all()
    got = y[adapter_pairs][:, columns].double()
    torch.testing.assert_close(got, wanted[adapter_pairs][:, columns], rtol=1e-5, atol=1e-5)


def test_a_base_only_step_changes_nothing() -> None:
    given, punica = stack(), wrapper([(-1, 4)])
    y = torch.ones(4 * TOPK, given.columns)
    blocks = punica.moe_lora_align_block_size(random_choices(4, TOPK, EXPERTS), EXPERTS)
    tables = given.ranks, given.scales, given.column_starts
    punica.add_lora_fused_moe(y, torch.ones(4, 24), given.lora_a, given.lora_b, *tables, blocks)
    assert (y == 1).all()


WRONG = {
    "x": lambda t: t[:5],
    "y": lambda t: t[:5],
    "ranks": lambda t: t[:, :, :2],
    "scales": lambda t: t.double(),
    "lora_a[1]": lambda t: t[:, :2],
    "lora_b[1]": lambda t: t.transpose(2, 3),
    "routed_weights": lambda t: t[:5],
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments_are_named(argument: str) -> None:
    given, punica = stack(), wrapper()
    good = {
        "x": torch.ones(ROWS, 24), "y": torch.ones(ROWS * TOPK, given.columns), "ranks": given.ranks,
        "scales": given.scales, "lora_a[1]": given.lora_a[1], "lora_b[1]": given.lora_b[1],
        "routed_weights": torch.ones(ROWS, TOPK),
    }  # fmt: skip
    bad = {**good, argument: WRONG[argument](good[argument])}
    blocks = punica.moe_lora_align_block_size(random_choices(ROWS, TOPK, EXPERTS), EXPERTS)
    with pytest.raises(KernelArgumentError) as caught:
        punica.add_lora_fused_moe(
            bad["y"], bad["x"], (given.lora_a[0], bad["lora_a[1]"]), (given.lora_b[0], bad["lora_b[1]"]),
            bad["ranks"], bad["scales"], given.column_starts, blocks, routed_weights=bad["routed_weights"],
        )  # fmt: skip
    assert caught.value.argument == argument


@pytest.mark.parametrize("x_rows", [ROWS, ROWS * TOPK], ids=["x by row", "x by pair"])
def test_base_product_of_the_experts_that_are_here(x_rows: int) -> None:
    torch.manual_seed(0)
    expert_map = torch.tensor([-1, 1, 0, -1, 2], dtype=torch.int32)
    choices, weights = random_choices(ROWS, TOPK, EXPERTS), torch.rand(ROWS, TOPK)
    x, w, bias = torch.randn(x_rows, 24), torch.randn(3, 17, 24), torch.randn(3, 17)
    y = torch.full((ROWS * TOPK, 17), torch.nan)
    blocks = align_experts(choices, 3, expert_map=expert_map)
    expert_product(y, x, w, blocks, bias=bias, routed_weights=weights)
    for pair, expert in enumerate(expert_map[choices.long()].flatten().tolist()):
        row = x[pair if x_rows > ROWS else pair // TOPK]
        wanted = (
            (w[expert] @ row + bias[expert]) * weights.flatten()[pair] if expert >= 0 else torch.zeros(17)
        )
        torch.testing.assert_close(y[pair], wanted, rtol=1e-4, atol=1e-5)
