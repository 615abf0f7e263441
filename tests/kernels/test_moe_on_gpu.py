"""Expert kernels and FP8 at real sizes, and under captured graphs. Run with `pytest -m gpu`."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.expert_product import align_experts, expert_product
from kernels.fused_moe_lora import fused_moe_lora, unaligned_blocks
from kernels.launching.fp8 import hidden_scales_shape, quantized, spread
from kernels.launching.moe_tuning import OnceConfig, PairConfig
from kernels.lora_expand_fp8 import lora_expand_fp8
from kernels.lora_linear_fp8 import add_pair_fp8
from kernels.lora_shrink_fp8 import lora_shrink_fp8
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta, LoRAMapping
from kernels.metadata.work_list import Run
from kernels.moe_lora_align import moe_lora_align_block_size
from kernels.punica_gpu import PunicaWrapperGPU
from kernels.reference import lora_expand_fp8 as reference_expand
from kernels.reference import lora_shrink_fp8 as reference_shrink
from kernels.tiles.fp8_tile import as_type
from tests.kernels.moe_stack import ExpertStack, make_expert_stack, random_choices
from tests.kernels.stack import row_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOPK, EXPERTS, WIDTH, WIDTHS = 4, 16, 1536, [768, 768]
STEPS: dict[str, list[Run]] = {
    "1": [(3, 1)],
    "64 of 8": [(slot, 1) for slot in range(8)] * 8,
    "64 of 1": [(5, 64)],
    "mixed": [(0, 300), (-1, 5), (7, 1), (2, 40), (-1, 1), (7, 30)],
    "4000 of 2": [(1, 1500), (-1, 20), (6, 2500)],
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
FORMS = {
    "pair": PairConfig(16, 128, 4, False, 4, 3, 256, 4),
    "pair, slices fused": PairConfig(16, 64, 2, True, 4, 3, 128, 4),
    "once": OnceConfig(64, 128, 2, 4, 2, 1),
}


def stack_of(dtype: torch.dtype, max_rank: int = 32) -> ExpertStack:
    ranks = torch.arange(2 * 8 * EXPERTS, dtype=torch.int32).view(2, 8, EXPERTS) * 7 % (max_rank + 1)
    return make_expert_stack(ranks, WIDTH, WIDTHS, max_rank, dtype).to("cuda")


def expected(stack: ExpertStack, y: Tensor, x: Tensor, choices: Tensor, slots: list[int]) -> Tensor:
    """float64, group by group."""
    out = y.double()
    of_row = torch.tensor(slots, device="cuda").repeat_interleave(TOPK)
    rows = x.double().repeat_interleave(TOPK, 0)
    for slot in sorted(set(slots) - {-1}):
        for expert in range(EXPERTS):
            pairs = ((of_row == slot) & (choices.flatten() == expert)).nonzero()[:, 0]
            for s, start in enumerate(stack.column_starts):
                rank = int(stack.ranks[s, slot, expert])
                a, b = stack.lora_a[s][slot, expert, :rank], stack.lora_b[s][slot, expert, :rank]
                h = rows[pairs] @ a.double().T * stack.scales[s, slot, expert].double()
                out[pairs, start : start + b.shape[1]] += h @ b.double()
    return out


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_real_sizes_against_float64(dtype: torch.dtype, form: str | None) -> None:
    torch.manual_seed(0)
    check_real_sizes(stack_of(dtype), dtype, form)


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_real_sizes_against_float64(fp8: torch.dtype, form: str | None) -> None:
    """The factors are what they are in FP8; activations bfloat16."""
    torch.manual_seed(0)
    check_real_sizes(stack_of(torch.float32).to("cuda", fp8), torch.bfloat16, form)


def check_real_sizes(stack: ExpertStack, dtype: torch.dtype, form: str | None) -> None:
    for name, runs in STEPS.items():
        slots = row_slots(runs)
        choices = random_choices(len(slots), TOPK, EXPERTS).to("cuda")
        x = torch.randn(len(slots), WIDTH, device="cuda").to(dtype)
        y = torch.randn(len(slots) * TOPK, stack.columns, device="cuda").to(dtype)
        punica = PunicaWrapperGPU(8, 4096, "cuda")
        punica.update_metadata(LoRAMapping(tuple(runs), ()))
        meta, tables = punica.token_mapping_meta, (stack.ranks, stack.scales, stack.column_starts)
        wanted = expected(stack, y, x, choices, slots)
        if form is None:
            blocks = [punica.moe_lora_align_block_size(choices, EXPERTS)]
        else:
            blocks = [moe_lora_align_block_size(choices, EXPERTS, size, meta) for size in (1, 16, 64)]
            blocks.append(unaligned_blocks(choices, EXPERTS, meta))
        for made in blocks:
            got, again = y.clone(), y.clone()
            config = None if form is None else FORMS[form]
            for out in (got, again):
                fused_moe_lora(out, x, stack.lora_a, stack.lora_b, *tables, made, config=config)
            assert error(got, wanted) < TOLERANCE[dtype], (name, made.block_size)
            assert torch.equal(got, again), (name, made.block_size)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_captured_graph_replays_other_adapters_ranks_and_choices(form: str, aligned: bool) -> None:
    torch.manual_seed(0)
    stack, rows = stack_of(torch.bfloat16), 48
    punica = PunicaWrapperGPU(8, 64, "cuda")
    plan, meta = LaunchPlan.for_graph(rows, 8), punica.token_mapping_meta
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(rows * TOPK, stack.columns, device="cuda", dtype=torch.bfloat16)
    choices = random_choices(rows, TOPK, EXPERTS).to("cuda")

    def run() -> None:
        if aligned:
            blocks = moe_lora_align_block_size(choices, EXPERTS, 16, meta)
        else:
            blocks = unaligned_blocks(choices, EXPERTS, meta)
        tables = stack.ranks, stack.scales, stack.column_starts
        fused_moe_lora(y, x, stack.lora_a, stack.lora_b, *tables, blocks, config=FORMS[form])

    punica.update_metadata(LoRAMapping(((2, rows),), ()), plan)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    steps: list[list[Run]] = [
        [(slot, 6) for slot in range(8)], [(7, 3), (-1, 34), (1, 11)], [(-1, rows)], [(3, rows)], [(2, 48)],
    ]  # fmt: skip
    for number, runs in enumerate(steps):
        if number == 3:
            stack.ranks.clamp_(max=5)
        punica.update_metadata(LoRAMapping(tuple(runs), ()), plan)
        choices.copy_(random_choices(rows, TOPK, EXPERTS // 2 if number % 2 else EXPERTS))
        y.normal_()
        before = y.clone()
        graph.replay()
        wanted = expected(stack, before, x, choices, row_slots(runs))
        assert error(y, wanted) < TOLERANCE[torch.bfloat16], number


@pytest.mark.parametrize("pairs", [8, 64, 1000, 4000])
def test_the_base_product_against_float64(pairs: int) -> None:
    torch.manual_seed(0)
    rows = pairs // TOPK
    choices, weights = random_choices(rows, TOPK, EXPERTS).to("cuda"), torch.rand(rows, TOPK, device="cuda")
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(EXPERTS, 1000, WIDTH, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(EXPERTS, 1000, device="cuda", dtype=torch.bfloat16)
    y = torch.full((pairs, 1000), torch.nan, device="cuda", dtype=torch.bfloat16)
    expert_product(y, x, w, align_experts(choices, EXPERTS), bias=bias, routed_weights=weights)
    wanted = torch.stack([w[e].double() @ x[p // TOPK].double() for p, e in enumerate(choices.flatten())])
    wanted = (wanted + bias[choices.flatten().long()].double()) * weights.flatten()[:, None].double()
    assert error(y, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("w8a8", [False, True], ids=["", "FP8 x FP8"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("group", [(0, 0), (1, 0), (128, 128)], ids=["tensor", "channel", "block"])
def test_fp8_pair_equals_the_reference(group: tuple[int, int], dtype: torch.dtype, w8a8: bool) -> None:
    torch.manual_seed(0)
    (group_n, group_k), max_rank = group, 32
    ranks = torch.tensor([[16, 1, 0, 32, 7, 16, 16, 20]] * 2, dtype=torch.int32, device="cuda")
    scales = torch.rand(2, 8, device="cuda") + 0.5
    joined = torch.randn(8, 2, max_rank, WIDTH + 768, device="cuda") * 0.02
    a, a_scales = fp8_slices(joined[..., :WIDTH], dtype, (group_n, group_k))
    b, b_scales = fp8_slices(joined[..., WIDTH:], dtype, (group_k, group_n))
    for runs in STEPS.values():
        rows = len(row_slots(runs))
        x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
        y = torch.randn(rows, 1536, device="cuda").bfloat16()
        x, x_scales = quantized(x, dtype, (1, group_k)) if w8a8 else (x, None)
        options, results = {"group_n": group_n, "group_k": group_k}, []
        for shrink, expand in (
            (reference_shrink.lora_shrink_fp8, reference_expand.lora_expand_fp8),
            (lora_shrink_fp8, lora_expand_fp8),
        ):
            meta = LoRAKernelMeta.make(8, 4096, "cuda")
            meta.prepare_tensors(runs)
            h = torch.zeros(2, rows, max_rank, device="cuda", dtype=dtype if w8a8 else torch.float32)
            factors = torch.zeros(hidden_scales_shape(2, rows, max_rank), device="cuda") if w8a8 else None
            out, more = y.clone(), {**options, "h_scales": factors}
            shrink(h, x, a, a_scales, ranks, scales, meta, x_scales=x_scales, **more)
            expand(out, h, b, b_scales, ranks, (0, 768), meta, **more)
            whole = h.float() if factors is None else h.float() * spread(factors, h.shape[1:], (1, 32))
            results.append((whole.cpu(), out.cpu()))
        assert error(results[1][0], results[0][0].double()) < (2e-2 if w8a8 else 2e-3)
        assert error(results[1][1], results[0][1].double()) < TOLERANCE[torch.bfloat16]


@triton.jit
def _convert(out, values, DTYPE: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(out + place, as_type(tl.load(values + place), DTYPE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_fp8_number_becomes_itself(fp8: torch.dtype, dtype: torch.dtype) -> None:
    values = torch.arange(256, device="cuda").to(torch.uint8).view(fp8)
    out = torch.empty(256, device="cuda", dtype=dtype)
    _convert[(1,)](out, values, tl.bfloat16 if dtype == torch.bfloat16 else tl.float16)
    numbers = values.float().isfinite()
    assert numbers.sum() >= 248
    assert torch.equal(out[numbers].float(), values.float()[numbers])


@pytest.mark.parametrize("runs", STEPS.values(), ids=STEPS)
def test_the_fp8_pair_is_near_the_dequantized_one(runs: list[Run]) -> None:
    torch.manual_seed(0)
    rows = len(row_slots(runs))
    ranks = torch.tensor([[16, 1, 0, 32, 7, 16, 16, 20]] * 2, dtype=torch.int32, device="cuda")
    scales = torch.rand(2, 8, device="cuda") + 0.5
    joined = torch.randn(8, 2, 32, WIDTH + 768, device="cuda") * 0.02
    a, a_scales = fp8_slices(joined[..., :WIDTH], torch.float8_e4m3fn, (0, 0))
    b, b_scales = fp8_slices(joined[..., WIDTH:], torch.float8_e4m3fn, (0, 0))
    meta = LoRAKernelMeta.make(8, 4096, "cuda")
    meta.prepare_tensors(runs)
    x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    y = torch.randn(rows, 1536, device="cuda").bfloat16()
    wanted = dequantized(y, x, a, a_scales, b, b_scales, ranks, scales, row_slots(runs))
    add_pair_fp8(y, x, a, a_scales, b, b_scales, ranks, scales, (0, 768), meta)
    assert error(y, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("w8a8", [False, True], ids=["", "FP8 x FP8"])
@pytest.mark.parametrize("rows_per_item", [1, 16])
def test_a_captured_fp8_graph_replays_other_adapters_and_ranks(rows_per_item: int, w8a8: bool) -> None:
    torch.manual_seed(0)
    rows, dtype = 48, torch.float8_e4m3fn
    ranks = torch.tensor([[16, 1, 0, 32, 7, 16, 16, 20]] * 2, dtype=torch.int32, device="cuda")
    scales, joined = torch.rand(2, 8, device="cuda") + 0.5, torch.randn(8, 2, 32, WIDTH + 768, device="cuda")
    a, a_scales = fp8_slices(joined[..., :WIDTH] * 0.02, dtype, (0, 0))
    b, b_scales = fp8_slices(joined[..., WIDTH:] * 0.02, dtype, (0, 0))
    x = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    y = torch.zeros(rows, 1536, device="cuda", dtype=torch.bfloat16)
    h = torch.zeros(2, rows, 32, device="cuda", dtype=dtype)
    h_scales = torch.zeros(hidden_scales_shape(2, rows, 32), device="cuda")
    meta = LoRAKernelMeta.make(8, 64, "cuda")
    plan = LaunchPlan.for_graph(rows, 8, rows_per_item=rows_per_item)

    def run() -> None:
        if w8a8:
            lora_shrink_fp8(h, x, a, a_scales, ranks, scales, meta, h_scales=h_scales)
            lora_expand_fp8(y, h, b, b_scales, ranks, (0, 768), meta, h_scales=h_scales)
        else:
            add_pair_fp8(y, x, a, a_scales, b, b_scales, ranks, scales, (0, 768), meta)

    meta.prepare_tensors([(2, rows)], plan)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    steps: list[list[Run]] = [
        [(slot, 6) for slot in range(8)], [(7, 3), (-1, 34), (1, 11)], [(-1, rows)], [(3, rows)], [(5, 48)],
    ]  # fmt: skip
    for number, runs in enumerate(steps):
        if number == 3:
            ranks.clamp_(max=5)
        meta.prepare_tensors(runs, plan)
        y.normal_(std=0.05)
        wanted = dequantized(y, x, a, a_scales, b, b_scales, ranks, scales, row_slots(runs))
        before = y.clone()
        graph.replay()
        if wanted.equal(before.double()):
            assert y.equal(before), number
        else:
            deltas = y.double() - before.double(), wanted - before.double()
            assert error(*deltas) < (5e-2 if w8a8 else 2e-2), number


def dequantized(
    y: Tensor,
    x: Tensor,
    a: list[Tensor],
    a_scales: list[Tensor],
    b: list[Tensor],
    b_scales: list[Tensor],
    ranks: Tensor,
    scales: Tensor,
    slots: list[int],
) -> Tensor:
    """float64: y with the deltas of two slices of 768 columns, one scale a tensor."""
    wanted, of_row = y.double(), torch.tensor(slots, device="cuda")
    for s, slot in product(range(2), range(8)):
        rank, here = int(ranks[s, slot]), of_row == slot
        whole_a = a[s][slot, :rank].double() * a_scales[s][slot].double()
        whole_b = b[s][slot, :rank].double() * b_scales[s][slot].double()
        delta = x[here].double() @ whole_a.T * scales[s, slot].double() @ whole_b
        wanted[here, s * 768 : s * 768 + 768] += delta
    return wanted


def fp8_slices(stack: Tensor, dtype: torch.dtype, group: tuple[int, int]) -> list[list[Tensor]]:
    """[values, scales] of both slices of [slots, slices, ranks, width]."""
    return [joint(w) for w in zip(*[quantized(stack[:, s], dtype, group) for s in range(2)], strict=True)]


def joint(slices: tuple[Tensor, ...]) -> list[Tensor]:
    """The slices as views of one memory with one slot stride."""
    flat = [part.flatten(1).view(torch.uint8) for part in slices]
    parts = torch.cat(flat, 1).split([part.shape[1] for part in flat], 1)
    if slices[0].dtype == torch.float32:
        return [part.contiguous() for part in slices]
    return [part.view(w.dtype).unflatten(1, w.shape[1:]) for part, w in zip(parts, slices, strict=True)]
