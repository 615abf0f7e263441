"""vLLM's expert operations at real sizes, and under captured graphs. Run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.vllm.experts import align_kernel, launch, reference
from kernels.vllm.fused_moe_lora import fused_moe_lora
from kernels.vllm.fused_moe_lora_fp8 import fused_moe_lora_fp8
from kernels.vllm.moe_lora_align import moe_lora_align_block_size
from tests.kernels.vllm.moe_step import Step, to_device
from tests.kernels.vllm.test_fused_moe_lora import choices_of
from tests.kernels.vllm.test_fused_moe_lora_fp8 import WAYS, quantize
from tests.kernels.vllm.test_moe_lora_align import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERTS = {"experts": 32, "max_loras": 8, "slots": (-1, *range(8)), "rank": 16, "width": 1024, "out": 768}
STEPS = {
    "1": Step(tokens=1, topk=8, **{**EXPERTS, "slots": (3,)}),
    "64": Step(tokens=64, topk=8, **EXPERTS),
    "64, a slot is disabled": Step(tokens=64, topk=8, disabled=(1,), **EXPERTS),
    "64 of one": Step(tokens=64, topk=8, **{**EXPERTS, "slots": (5,)}),
    "1500": Step(tokens=1500, topk=4, block_size=64, **EXPERTS),
    "down": Step(tokens=64, topk=8, by_pair=True, **{**EXPERTS, "out": 1024}, slices=1),
    "rank 100": Step(tokens=33, topk=2, **{**EXPERTS, "rank": 100}),
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.cpu().double() - wanted).norm() / wanted.norm()).item()


def expected(step: Step, a: list[Tensor], b: list[Tensor], x: Tensor, y: Tensor, given: dict) -> Tensor:
    """float64, group by group: pair by pair takes minutes at these sizes."""
    choices, wide = choices_of(step, a, given, "cpu"), [[w.double() for w in stack] for stack in (a, b)]
    out = y.double().view(choices.num_pairs, -1)
    routed = given["topk_weights"].double().view(-1, 1)
    for slot, expert, _, pairs in choices.blocks():
        rows = x[pairs if step.by_pair else pairs // step.topk].double()
        for s in range(step.slices):
            delta = rows @ wide[0][s][slot, expert].T @ wide[1][s][slot, expert].T
            columns = slice(step.offset + s * step.out, step.offset + (s + 1) * step.out)
            out[pairs, columns] += delta * routed[pairs] if step.by_pair else delta
    return out.view(y.shape)


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_real_sizes_against_float64(step: Step, dtype: torch.dtype, is_sorted: bool) -> None:
    step = replace(step, dtype=dtype)
    given, (a, b, x, y) = step.choices(is_sorted), step.layer()
    wanted = expected(step, a, b, x, y, given)
    outputs = []
    for _ in range(2):
        there = {name: to_device(value, "cuda") for name, value in given.items()}
        there["num_active_loras"] = given["num_active_loras"]
        stacks, out = [to_device(each, "cuda") for each in (a, b, x)], y.cuda()
        fused_moe_lora(**step.arguments(*stacks, out, there))
        outputs.append(out)
    assert error(outputs[0], wanted) < TOLERANCE[dtype]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("config", ["pair", "once", "persistent"])
def test_every_form(config: str) -> None:
    from tests.kernels.vllm.test_fused_moe_lora import CONFIGS

    step = replace(STEPS["64"], dtype=torch.bfloat16)
    for is_sorted in (True, False):
        given, (a, b, x, y) = step.choices(is_sorted), step.layer()
        wanted = expected(step, a, b, x, y, given)
        choices = choices_of(step, a, given, "cuda")
        a, b, x, y = (to_device(each, "cuda") for each in (a, b, x, y))
        flat = y.view(choices.num_pairs, -1)
        launch.fused(flat, x, a, b, choices, step.topk, 0, None, True, config=CONFIGS[config])
        assert error(y, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows_fp8", [True, False], ids=["FP8 x FP8", "weights alone"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
def test_fp8_against_float64(is_sorted: bool, way: str, rows_fp8: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 came with sm_89")
    step = STEPS["64"]
    given, y = step.choices(is_sorted), step.layer()[3].bfloat16()
    quant, (a, b, x) = quantize(step, way, rows_fp8)
    if not rows_fp8:
        quant["qcurr_hidden_states"] = x = x.bfloat16()
    wanted = expected(step, a, b, x, y, given)
    there = {name: to_device(value, "cuda") for name, value in {**given, **quant}.items()}
    there["num_active_loras"], out = step.max_loras + 1, y.cuda()
    arguments = step.arguments(None, None, None, out, {n: there[n] for n in given})
    fused_moe_lora_fp8(**{**arguments, **{name: there[name] for name in quant}})
    assert error(out, wanted) < 6e-3


@pytest.mark.parametrize("tokens", [1, 64, 500, 5000])
def test_alignment(tokens: int) -> None:
    case = Case(tokens, topk=8, experts=128, max_loras=8, slots=(-1, 0, 3, 7), lora_ids=(-1, 0, 3, 7))
    inputs = case.inputs()
    wanted = case.run(reference.moe_lora_align_block_size, inputs, "cpu")
    got = case.run(align_kernel.moe_lora_align_block_size, inputs, "cuda")
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
def test_a_captured_graph_replays_other_choices_and_slots(is_sorted: bool) -> None:
    """Alignment and experts in one graph, captured with no slot; replayed twice with other steps."""
    steps = [replace(STEPS["64"], seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    steps[0] = replace(steps[0], slots=(-1,))
    a, b, x, y = (to_device(each, "cuda") for each in replace(steps[1]).layer())
    inputs = {name: to_device(value, "cuda") for name, value in steps[0].choices(False).items()}
    inputs["num_active_loras"] = torch.tensor([steps[0].max_loras + 1], dtype=torch.int32)
    pairs, experts = inputs["topk_ids"].numel(), steps[0].experts
    places, slots = pairs + experts * 15, steps[0].max_loras
    tables = [torch.empty(slots, n, dtype=torch.int32, device="cuda") for n in (places, -(-places // 16))]
    post_pad, out = torch.empty(slots, dtype=torch.int32, device="cuda"), y.clone()

    def run() -> None:
        out.copy_(y)
        given = dict(inputs)
        if is_sorted:
            moe_lora_align_block_size(
                inputs["topk_ids"], inputs["token_lora_mapping"], experts, 16, slots, places,
                tables[1].shape[1], *tables, post_pad, inputs["adapter_enabled"], inputs["lora_ids"],
            )  # fmt: skip
            given |= {"sorted_token_ids": tables[0], "expert_ids": tables[1]}
            given |= {"num_tokens_post_padded": post_pad}
        fused_moe_lora(**steps[0].arguments(a, b, x, out, given))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for step in steps:
        given = step.choices(False)
        for name in ("topk_ids", "token_lora_mapping", "lora_ids", "adapter_enabled", "topk_weights"):
            inputs[name].copy_(given[name])
        # The unsorted form reads the choices themselves.
        inputs["expert_ids"].copy_(given["expert_ids"])
        graph.replay()
        wanted = expected(step, *([w.cpu() for w in each] for each in (a, b)), x.cpu(), y.cpu(), given)
        assert error(out, wanted) < TOLERANCE[torch.bfloat16]
