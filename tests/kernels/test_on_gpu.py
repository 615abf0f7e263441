"""Real shapes, real dtypes, captured graphs: what only a GPU shows. Run with `pytest -m gpu`."""

from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.launching.side_stream import SideStream
from kernels.lora_linear import add_pair_beside
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta, LoRAMapping
from kernels.metadata.work_list import Run
from kernels.punica_gpu import PunicaWrapperGPU
from tests.kernels.stack import Stack, make_stack, row_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = {"qkv": (4096, [4096, 1024, 1024]), "gate_up": (4096, [14336, 14336]), "down": (14336, [4096])}
STEPS: dict[str, list[Run]] = {
    "1 of 1": [(3, 1)],
    "64 of 64": [(slot, 1) for slot in range(16)] * 4,
    "64 of 1": [(5, 64)],
    "mixed": [(0, 300), (-1, 5), (7, 1), (9, 40), (-1, 1), (7, 30)],
    "16384 of 8": [(slot, 2048) for slot in range(8)],
}
RANKS = [16, 64, 1, 0, 8, 33, 64, 5, 16, 256, 2, 100, 16, 16, 64, 8]
# Relative Frobenius error of the whole output.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def gpu_stack(layer: str, dtype: torch.dtype) -> Stack:
    width, widths = LAYERS[layer]
    ranks = [RANKS[turn:] + RANKS[:turn] for turn in range(len(widths))]
    return make_stack(ranks, width, widths, max_rank=256, dtype=dtype).to("cuda")


def wrapper(stack: Stack) -> PunicaWrapperGPU:
    punica = PunicaWrapperGPU(16, 16384, "cuda")
    for slot, rank in enumerate(stack.ranks.amax(0).tolist()):
        punica.set_slot_rank(slot, rank)
    return punica


def step(punica: PunicaWrapperGPU, runs: list[Run], plan: LaunchPlan | None = None) -> None:
    punica.update_metadata(LoRAMapping(tuple(runs), ()), plan)


def add(punica: PunicaWrapperGPU, stack: Stack, y: Tensor, x: Tensor) -> None:
    punica.add_lora_linear(y, x, stack.lora_a, stack.lora_b, stack.ranks, stack.scales, stack.column_starts)


def expected(stack: Stack, y: Tensor, x: Tensor, runs: list[Run]) -> Tensor:
    """float64, slot by slot."""
    out, slots = y.double(), torch.tensor(row_slots(runs), device="cuda")
    for slot in sorted(set(row_slots(runs)) - {-1}):
        rows = (slots == slot).nonzero()[:, 0]
        for s, start in enumerate(stack.column_starts):
            rank = int(stack.ranks[s, slot])
            a, b = stack.lora_a[s][slot, :rank].double(), stack.lora_b[s][slot, :rank].double()
            out[rows, start : start + b.shape[1]] += (
                x[rows].double() @ a.T * stack.scales[s, slot].double()
            ) @ b
    return out


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_real_shapes_against_float64(layer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = gpu_stack(layer, dtype)
    punica = wrapper(stack)
    for name, runs in STEPS.items():
        if name == "16384 of 8" and layer == "gate_up":
            continue  # float64 of that output is 4 GB, and it shows nothing that qkv does not
        rows = len(row_slots(runs))
        x = torch.randn(rows, stack.lora_a[0].shape[2], device="cuda").to(dtype)
        y = torch.randn(rows, stack.column_starts[-1] + stack.lora_b[-1].shape[2], device="cuda").to(dtype)
        step(punica, runs)
        first, second = y.clone(), y.clone()
        add(punica, stack, first, x)
        add(punica, stack, second, x)
        assert error(first, expected(stack, y, x, runs)) < TOLERANCE[dtype], name
        assert torch.equal(first, second), name
        assert not punica.token_mapping_meta.finished_splits.any()


@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize("layer", ["qkv", "o", "gate_up", "down"])
def test_block_sizes_of_low_ranks(layer: str, rank: int) -> None:
    """Row by row, few entries, many, few 64-row tiles, many: each has its own."""
    torch.manual_seed(0)
    width, widths = {**LAYERS, "o": (4096, [4096])}[layer]
    stack = make_stack([[rank] * 40] * len(widths), width, widths, 32, torch.bfloat16).to("cuda")
    punica = PunicaWrapperGPU(40, 4096, "cuda")
    for slot in range(40):
        punica.set_slot_rank(slot, rank)
    for adapters, count in ((1, 1), (40, 1), (1, 64), (8, 16), (40, 6), (8, 64), (2, 2048)):
        runs = [(slot, count) for slot in range(adapters)]
        x = torch.randn(adapters * count, width, device="cuda").to(torch.bfloat16)
        y = torch.randn(len(x), stack.column_starts[-1] + widths[-1], device="cuda").to(torch.bfloat16)
        step(punica, runs)
        got = y.clone()
        add(punica, stack, got, x)
        assert error(got, expected(stack, y, x, runs)) < TOLERANCE[torch.bfloat16], (adapters, count)


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("rows_per_item", [1, 16])
def test_a_captured_graph_replays_other_adapters_ranks_and_counts(rows_per_item: int, parts: bool) -> None:
    torch.manual_seed(0)
    stack = gpu_stack("qkv", torch.bfloat16)
    punica, rows = wrapper(stack), 16
    plan = LaunchPlan.for_graph(rows, 16, rows_per_item=rows_per_item, parts=parts)
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(rows, stack.column_starts[-1] + 1024, device="cuda", dtype=torch.bfloat16)
    step(punica, [(2, 16)], plan)
    add(punica, stack, y, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(punica, stack, y, x)
    steps = [[(slot, 1) for slot in range(16)], [(9, 3), (-1, 2), (1, 11)], [(-1, 16)], [(9, 16)], [(2, 16)]]
    for number, runs in enumerate(steps):
        if number == 3:
            stack.ranks.clamp_(max=5)
        step(punica, runs, plan)
        y.normal_()
        before = y.clone()
        graph.replay()
        wanted = expected(stack, before, x, runs)
        assert error(y, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("runs", [[(2, 64)], [(slot, 1) for slot in range(16)] * 4, [(-1, 64)]], ids=str)
def test_the_pair_with_its_shrink_beside_the_product(runs: list[Run]) -> None:
    """Under capture, as engines use it: product and pair, replayed on new rows."""
    torch.manual_seed(0)
    stack, side = gpu_stack("qkv", torch.bfloat16), SideStream("cuda")
    meta = LoRAKernelMeta.make(16, 64, "cuda")
    meta.prepare_tensors(runs)
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(64, stack.column_starts[-1] + 1024, device="cuda", dtype=torch.bfloat16)
    base = torch.randn(4096, y.shape[1], device="cuda", dtype=torch.bfloat16) / 64
    tables = stack.ranks, stack.scales, stack.column_starts, meta

    def call() -> None:
        product = partial(torch.mm, x, base, out=y)
        assert add_pair_beside(product, side, x, stack.lora_a, stack.lora_b, *tables) is y

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert error(y, expected(stack, x @ base, x, runs)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("slots", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [90_000, 180_000])
def test_the_last_rows_of_a_step_whose_offsets_exceed_32_bits(rows: int, slots: torch.dtype) -> None:
    """In bytes with 90,000 rows, in elements too with 180,000."""
    torch.manual_seed(0)
    width, last, stack = 12_288, 64, make_stack([[0, 4]], 12_288, [12_288], max_rank=4, dtype=torch.bfloat16)
    assert rows * width * 2 > 2**31
    x, y = (torch.empty(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for tensor in (x, y):
        tensor[-last:] = torch.randn(last, width).bfloat16()
    before, there, punica = y[-last:].clone(), stack.to("cuda"), PunicaWrapperGPU(2, rows, "cuda")
    step(punica, [(-1, rows - last), (1, last)])
    lora_a, lora_b = ([tensor.to(slots) for tensor in half] for half in (there.lora_a, there.lora_b))
    punica.add_lora_linear(y, x, lora_a, lora_b, there.ranks, there.scales, [0])
    unchanged = before.clone()
    step(punica, [(1, last)])
    punica.add_lora_linear(before, x[-last:], lora_a, lora_b, there.ranks, there.scales, [0])
    assert torch.equal(y[-last:], before)
    assert not torch.equal(before, unchanged)


def test_steps_may_follow_each_other_without_waiting() -> None:
    """The host refills the metadata while the GPU still works on earlier steps."""
    torch.manual_seed(0)
    stack = gpu_stack("down", torch.bfloat16)
    punica = wrapper(stack)
    x = torch.randn(64, 14336, device="cuda", dtype=torch.bfloat16)
    steps = [
        [(slot, 4) for slot in range(16)],
        [(1, 64)],
        [(-1, 60), (9, 4)],
        [(slot % 16, 1) for slot in range(64)],
    ] * 5
    outputs = [torch.zeros(64, 4099, device="cuda", dtype=torch.bfloat16) for _ in steps]
    for runs, y in zip(steps, outputs, strict=True):
        step(punica, runs)
        add(punica, stack, y, x)
    for runs, y in zip(steps, outputs, strict=True):
        assert error(y, expected(stack, torch.zeros_like(y), x, runs)) < TOLERANCE[torch.bfloat16]
