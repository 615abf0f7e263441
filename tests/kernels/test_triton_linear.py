"""The Triton pair against float64, row by row: in Triton's interpreter, or on the GPU where there is one."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.launching.tuning import shrink_config
from kernels.metadata.launch_plan import PARTS, LaunchPlan
from kernels.metadata.meta import LoRAMapping
from kernels.metadata.work_list import Run
from kernels.punica_gpu import PunicaWrapperGPU
from tests.kernels.stack import DEVICE, DTYPES, Stack, make_stack, row_slots

RANKS = [1, 2, 3, 5, 8, 12, 16, 24, 48, 64]
STEPS: dict[str, list[Run]] = {
    "one token": [(7, 1)],
    "distinct": [(slot, 1) for slot in range(10)],
    "distinct shuffled, base between": [(3, 1), (-1, 1), (9, 1), (0, 1), (-1, 2), (7, 1), (1, 1)],
    "identical": [(4, 33)],
    "zipf": [(slot, 40 // (slot + 1)) for slot in range(10)],
    "skewed": [(0, 40), *((slot, 1) for slot in range(1, 10))],
    "ABAB": [(0, 1), (1, 7), (0, 16), (1, 33)],
    "A-B-A": [(2, 16), (-1, 7), (3, 1), (-1, 1), (2, 33)],
    "no adapter": [(-1, 9)],
    "zero rows": [],
}
# Of the largest output: one rounding of y, and of h where it enters a matrix product.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def make_wrapper(stack: Stack, max_rows: int = 600) -> PunicaWrapperGPU:
    punica = PunicaWrapperGPU(stack.ranks.shape[1], max_rows, DEVICE)
    for slot, rank in enumerate(stack.ranks.amax(0).tolist()):
        punica.set_slot_rank(slot, rank)
    return punica


def step(punica: PunicaWrapperGPU, runs: list[Run], plan: LaunchPlan | None = None) -> None:
    punica.update_metadata(LoRAMapping(tuple(runs), tuple(runs)), plan, plan)


def check_linear(stack: Stack, runs: list[Run], punica: PunicaWrapperGPU, columns: int = 70) -> torch.Tensor:
    """Compares, and returns what was computed."""
    dtype, slots = stack.arena.dtype, row_slots(runs)
    x, y = (
        torch.randn(len(slots), stack.lora_a[0].shape[2]).to(dtype),
        torch.randn(len(slots), columns).to(dtype),
    )
    there, moved = stack.to(DEVICE), y.clone().to(DEVICE)
    punica.add_lora_linear(
        moved, x.to(DEVICE), there.lora_a, there.lora_b, there.ranks, there.scales, stack.column_starts
    )
    got = moved.cpu()
    for row, slot in enumerate(slots):
        expected = y[row].double() + stack.delta(x[row], slot, columns)
        bound = TOLERANCE[dtype] * (1 + expected.abs().max().item())
        torch.testing.assert_close(got[row].double(), expected, rtol=0, atol=bound)
        assert slot >= 0 or torch.equal(got[row], y[row])
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runs", STEPS.values(), ids=STEPS.keys())
def test_equals_the_row_by_row_answer_for_mixed_ranks(runs: list[Run], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = make_stack([RANKS, RANKS[::-1], [0, 64] * 5], 300, [40, 8, 9], max_rank=64, dtype=dtype)
    punica = make_wrapper(stack)
    step(punica, runs)
    check_linear(stack, runs, punica)


@pytest.mark.parametrize(
    ("ranks", "in_features", "form"),
    [
        ([[3, 60], [64, 1], [0, 9]], 130, "tiles"),
        ([[3, 16], [16, 1]], 8200, "tiles"),
        ([[3, 16], [16, 1], [0, 9]], 130, "items"),
        ([[3, 16], [16, 1]], 1100, "items"),
        ([[3, 16]], 1100, "items, splits added by expand"),
        ([[32, 20], [17, 0]], 300, "items"),
    ],
    ids=["rank 64", "wide", "three slices", "two slices", "one slice", "rank 32"],
)
def test_prefill_over_tiles_or_items(ranks: list[list[int]], in_features: int, form: str) -> None:
    torch.manual_seed(0)
    stack = make_stack(ranks, in_features, [40, 8, 9][: len(ranks)], max_rank=64)
    punica, runs = make_wrapper(stack), [(1, 300), (-1, 20), (0, 230)]
    step(punica, runs)
    plan = punica.token_mapping_meta.plan
    config = shrink_config(plan, len(ranks), in_features, 4)
    assert plan.tiles == 9
    assert (config.fused, config.final) == (form == "tiles", form in ("tiles", "items"))
    check_linear(stack, runs, punica)


@pytest.mark.parametrize(
    "others", [[(slot, 1) for slot in range(5)], [(1, 21), (0, 2)]], ids=["distinct", "shared"]
)
def test_one_high_rank_among_low_ones_is_cut_into_parts(others: list[Run]) -> None:
    torch.manual_seed(0)
    ranks = [8, 7, 8, 3, 8, 200]
    stack = make_stack([ranks, ranks], 70, [1100, 30], max_rank=256)
    punica, runs = make_wrapper(stack), [*others, (5, 1)]
    step(punica, runs)
    entries = punica.token_mapping_meta.items.tolist()
    assert [(slot, part) for slot, _, _, part in entries[:PARTS]] == [(5, part) for part in range(PARTS)]
    assert entries[PARTS][3] == -1
    check_linear(stack, runs, punica, columns=1140)


def test_without_rank_hints_every_rank_is_still_right() -> None:
    torch.manual_seed(0)
    stack = make_stack([[256, 1, 100]], 40, [50], max_rank=256)
    punica = PunicaWrapperGPU(3, 64, DEVICE)
    for runs in ([(0, 1), (1, 1), (2, 1)], [(0, 17), (2, 3)]):
        step(punica, runs)
        check_linear(stack, runs, punica)


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("rows_per_item", [1, 16])
def test_one_plan_serves_steps_with_other_adapters_counts_and_ranks(rows_per_item: int, parts: bool) -> None:
    torch.manual_seed(0)
    stack = make_stack([RANKS, RANKS[::-1]], 40, [32, 9], max_rank=64)
    punica = make_wrapper(stack)
    plan = LaunchPlan.for_graph(12, 10, rows_per_item=rows_per_item, block_rank=8, parts=parts)
    for runs in ([(0, 12)], [(slot, 1) for slot in range(10)], [(-1, 12)], [], [(9, 1), (-1, 1), (9, 10)]):
        step(punica, runs, plan)
        assert punica.token_mapping_meta.plan == plan
        check_linear(stack, runs, punica)


def test_sequences_that_end_one_by_one_leave_nothing_behind() -> None:
    """Eight adapters down to none under the plan of eight: the lists' tails must be idle in each step."""
    torch.manual_seed(0)
    stack = make_stack([RANKS], 40, [32], max_rank=64)
    punica, plan = make_wrapper(stack), LaunchPlan.for_graph(8, 10, block_rank=8)
    for left in range(8, -1, -1):
        step(punica, [(slot, 1) for slot in range(left)], plan)
        assert (punica.token_mapping_meta.items[left:, 0] == -1).all()
        check_linear(stack, [(slot, 1) for slot in range(left)], punica)


def test_a_known_layer_is_checked_again_where_it_can_change() -> None:
    stack = make_stack([[4, 4], [4, 2]], 40, [32, 8], max_rank=4)
    punica, there = make_wrapper(stack), stack.to(DEVICE)
    step(punica, [(0, 2), (1, 1)])

    def add(y: torch.Tensor, x: torch.Tensor, starts: list[int]) -> None:
        punica.add_lora_linear(y, x, there.lora_a, there.lora_b, there.ranks, there.scales, starts)

    x, y = torch.ones(3, 40, device=DEVICE), torch.ones(3, 40, device=DEVICE)
    add(y, x, [0, 32])
    for problem, bad in {
        "^y .*3 rows": (y[:2], x, [0, 32]),
        "^x .*3 rows": (y, x[:2], [0, 32]),
        "^x is torch.float64": (y, x.double(), [0, 32]),
        "^y must be contiguous": (torch.ones(3, 80, device=DEVICE)[:, ::2], x, [0, 32]),
        "^lora_a": (y, x[:, :39], [0, 32]),
        "^column_starts": (y, x, [0, 33]),
    }.items():
        with pytest.raises(KernelArgumentError, match=problem):
            add(*bad)


def test_a_known_layer_is_right_in_each_call() -> None:
    """Other plans, strides and alignments, three calls of each: only first calls pass Triton's binding."""
    torch.manual_seed(0)
    stack = make_stack([[4, 4], [4, 2]], 40, [32, 8], max_rank=4)
    punica, there = make_wrapper(stack), stack.to(DEVICE)
    for runs in ([(0, 2), (1, 1)], [(1, 17)], [(1, 16)], [(-1, 2)], [(0, 2), (1, 1)]):
        step(punica, runs)
        slots = row_slots(runs)
        for first, stride in ((0, 48), (1, 48), (0, 49)):
            memory = torch.randn(2, len(slots), stride, device=DEVICE)
            x, y = memory[0, :, first : first + 40], memory[1, :, first : first + 46]
            expected = y.cpu().double()
            for _ in range(3):
                punica.add_lora_linear(
                    y, x, there.lora_a, there.lora_b, there.ranks, there.scales, stack.column_starts
                )
                for row, slot in enumerate(slots):
                    expected[row] += stack.delta(x[row].cpu(), slot, 46)
                torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replaced", [slice(None), slice(1, None)], ids=["all slices", "the second"])
def test_a_known_layer_whose_memory_is_replaced_reads_the_new_one(replaced: slice) -> None:
    torch.manual_seed(0)
    stack, other = (make_stack([[4, 4]] * 2, 40, [32, 8], max_rank=4).to(DEVICE) for _ in range(2))
    punica, x = make_wrapper(stack), torch.ones(3, 40, device=DEVICE)
    step(punica, [(0, 2), (1, 1)])

    def added(to: Stack) -> torch.Tensor:
        y = torch.zeros(3, 46, device=DEVICE)
        punica.add_lora_linear(y, x, to.lora_a, to.lora_b, to.ranks, to.scales, to.column_starts)
        return y[:, stack.column_starts[1] if replaced.start else 0 :]

    stack.scales.copy_(other.scales)
    before, wanted = [added(stack) for _ in range(3)], added(other)
    for own, others in ((stack.lora_a, other.lora_a), (stack.lora_b, other.lora_b)):
        for weight, by in zip(own[replaced], others[replaced], strict=True):
            weight.data = by
    assert not torch.equal(before[2], wanted)
    assert torch.equal(added(stack), wanted)


def test_a_layer_with_new_weights_uses_them() -> None:
    stack = make_stack([[4, 4]], 40, [32], max_rank=4)
    punica, runs = make_wrapper(stack), [(0, 2), (1, 1)]
    step(punica, runs)
    for seed in range(3):
        torch.manual_seed(seed)
        check_linear(make_stack([[4, 4]], 40, [32], max_rank=4), runs, punica, columns=35)


def test_repeated_runs_are_bit_identical() -> None:
    stack = make_stack([[9, 16]], 700, [60], max_rank=16)
    punica, runs = make_wrapper(stack), [(0, 20), (1, 17)]
    step(punica, runs)
    results = []
    for _ in range(3):
        torch.manual_seed(1)
        results.append(check_linear(stack, runs, punica))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not punica.token_mapping_meta.finished_splits.any()


def test_slot_and_row_products_beyond_32_bits() -> None:
    """Every stride is below 2^31, slot x stride and row x stride are not. Untouched pages cost no memory."""
    torch.manual_seed(0)
    slots, rows, stride, width = 4, 4, 2**31 // 3 + 8, 32
    assert stride < 2**31 < (slots - 1) * stride
    arena = torch.empty(slots * stride, dtype=torch.float16, device=DEVICE)
    views = [arena.as_strided((slots, 4, width), (stride, width, 1), offset) for offset in (0, 4 * width)]
    x = torch.empty(rows * stride, dtype=torch.float16, device=DEVICE).as_strided((rows, width), (stride, 1))
    y = torch.empty(rows * stride, dtype=torch.float16, device=DEVICE).as_strided((rows, width), (stride, 1))
    for tensor in (*(view[3] for view in views), x[3], y[3]):
        tensor.copy_(torch.randn(tensor.shape))
    before, a, b = y[3].double(), views[0][3].double(), views[1][3].double()
    ranks = torch.tensor([[0, 0, 0, 4]], dtype=torch.int32, device=DEVICE)
    punica = PunicaWrapperGPU(slots, rows, DEVICE)
    for runs in ([(-1, 3), (3, 1)], [(0, 1), (1, 2), (3, 1)]):
        y[3] = before.half()
        step(punica, runs)
        punica.add_lora_linear(y, x, [views[0]], [views[1]], ranks, torch.ones(1, slots, device=DEVICE), [0])
        expected = before + (a @ x[3].double()) @ b
        torch.testing.assert_close(y[3].double(), expected, rtol=2e-3, atol=2e-2)


def test_slots_out_of_range_in_the_device_buffers_are_ignored() -> None:
    stack = make_stack([[4, 4]], 40, [32], max_rank=4)
    punica = make_wrapper(stack)
    step(punica, [(0, 2), (1, 1)])
    punica.token_mapping_meta.items[0, 0] = 10**6
    punica.token_mapping_meta.items[1, 0] = -7
    there = stack.to(DEVICE)
    x, y = torch.ones(3, 40, device=DEVICE), torch.ones(3, 35, device=DEVICE)
    punica.add_lora_linear(y, x, there.lora_a, there.lora_b, there.ranks, there.scales, [3])
    assert torch.equal(y[:2], torch.ones(2, 35, device=DEVICE))
    assert not torch.equal(y[2], torch.ones(35, device=DEVICE))
