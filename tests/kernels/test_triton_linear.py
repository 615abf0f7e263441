"""The Triton pair against a float64 row-by-row answer: in Triton's interpreter, or on the GPU where there is one."""

import pytest
import torch

from kernels.launch_plan import LaunchPlan
from kernels.meta import LoRAMapping, Run
from kernels.punica_gpu import PunicaWrapperGPU
from tests.kernels.stack import Stack, make_stack, row_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = [1, 2, 3, 5, 8, 12, 16, 24, 48, 64]
ZIPF = [(slot, 40 // (slot + 1)) for slot in range(10)]
STEPS: dict[str, list[Run]] = {
    "one token": [(7, 1)],
    "distinct": [(slot, 1) for slot in range(10)],
    "distinct shuffled, base between": [(3, 1), (-1, 1), (9, 1), (0, 1), (-1, 2), (7, 1), (1, 1)],
    "identical": [(4, 33)],
    "zipf": ZIPF,
    "skewed": [(0, 40), *((slot, 1) for slot in range(1, 10))],
    "ABAB": [(0, 1), (1, 7), (0, 16), (1, 33)],
    "A-B-A": [(2, 16), (-1, 7), (3, 1), (-1, 1), (2, 33)],
    "no adapter": [(-1, 9)],
    "zero rows": [],
    "tiles": [(5, 300), (-1, 20), (8, 230)],
}
# Relative to the largest output: one rounding of y, and of h where it enters a matrix product.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ON_THIS_DEVICE = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def wrapper(runs: list[Run], stack: Stack, plan: LaunchPlan | None = None) -> PunicaWrapperGPU:
    punica = PunicaWrapperGPU(stack.ranks.shape[1], 600, DEVICE)
    for slot, rank in enumerate(stack.ranks.amax(0).tolist()):
        punica.set_slot_rank(slot, rank)
    punica.update_metadata(LoRAMapping(tuple(runs), tuple(runs)), plan, plan)
    return punica


def expected_output(y: torch.Tensor, x: torch.Tensor, stack: Stack, runs: list[Run]) -> torch.Tensor:
    rows = [y[i].double() + stack.delta(x[i], slot, y.shape[1]) for i, slot in enumerate(row_slots(runs))]
    return torch.stack(rows) if rows else y.double()


def check_linear(
    stack: Stack, runs: list[Run], punica: PunicaWrapperGPU, dtype: torch.dtype, columns: int
) -> None:
    on_device = stack.to(DEVICE)
    rows = len(row_slots(runs))
    x, y = torch.randn(rows, stack.lora_a[0].shape[2]).to(dtype), torch.randn(rows, columns).to(dtype)
    expected, moved = expected_output(y, x, stack, runs), y.to(DEVICE)
    punica.add_lora_linear(
        moved,
        x.to(DEVICE),
        on_device.lora_a,
        on_device.lora_b,
        on_device.ranks,
        on_device.scales,
        stack.column_starts,
    )
    got = moved.cpu().double()
    torch.testing.assert_close(
        got, expected, rtol=0, atol=TOLERANCE[dtype] * (1 + expected.abs().max().item() if rows else 1)
    )
    base = [row for row, slot in enumerate(row_slots(runs)) if slot == -1]
    assert torch.equal(got[base], y.double()[base])


@pytest.mark.parametrize("dtype", ON_THIS_DEVICE, ids=str)
@pytest.mark.parametrize("runs", STEPS.values(), ids=STEPS.keys())
def test_equals_the_row_by_row_answer_for_mixed_ranks(runs: list[Run], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = make_stack([RANKS, RANKS[::-1], [0, 64] * 5], 300, [40, 8, 9], max_rank=64, dtype=dtype)
    check_linear(stack, runs, wrapper(runs, stack), dtype, columns=70)
