"""vLLM's expert operations with FP8 weights, as those without: truth, kernels, and what is refused."""

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.fp8 import quantized, spread
from kernels.launching.moe_tuning import PairConfig
from kernels.vllm import fused_moe_lora_fp8 as ours
from kernels.vllm.experts import launch, reference
from kernels.vllm.scaling import Scaling
from tests.kernels.stack import DEVICE
from tests.kernels.vllm.moe_step import Step, to_device
from tests.kernels.vllm.test_fused_moe_lora import choices_of, halves

# (group of outputs and inputs, flags): as vLLM names the three ways.
WAYS: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    "tensor": ((0, 0), {}),
    "channel": ((1, 0), {"per_channel_quant": True}),
    "block": ((16, 32), {"block_shape": [16, 32]}),
}
STEPS = {
    "gate and up": Step(tokens=4, rank=18, width=40, out=20, slots=(-1, 0, 1), max_loras=2),
    "down, a rank of two groups": Step(
        tokens=2, rank=40, width=64, out=20, slices=1, by_pair=True, slots=(0, 1), max_loras=2
    ),
}
CONFIG = PairConfig(16, 32, 2, False, 4, 2, 32, 4)


def quantize(step: Step, way: str, rows_fp8: bool) -> tuple[dict[str, object], list[object]]:
    """(arguments of scales and what they scale, the same A, B and x as numbers)."""
    group, flags = WAYS[way]
    a, b, x, _ = step.layer()
    fp8 = torch.float8_e4m3fn
    arguments: dict[str, object] = {"use_fp8_w8a8": True, **flags}
    numbers: list[object] = []
    for name, stack in (("lora_a", a), ("lora_b", b)):
        both = [quantized(weight, fp8, group) for weight in stack]
        arguments[f"{name}_stacked"] = [values for values, _ in both]
        scales = [scale.squeeze((-2, -1)) if way == "tensor" else scale for _, scale in both]
        arguments[f"{name}_scale_stacked"] = scales
        shape = stack[0].shape[-2:]
        numbers.append([values.float() * spread(scale, shape, group) for values, scale in both])
    if rows_fp8:
        by = (1, group[1])
        values, scale = quantized(x, fp8, by)
        arguments |= {"shrink_act_scale": scale}
        x, numbers = values, [*numbers, values.float() * spread(scale, x.shape, by)]
    else:
        numbers.append(x)
    return {**arguments, "qcurr_hidden_states": x}, numbers


@pytest.mark.parametrize("rows_fp8", [True, False], ids=["FP8 x FP8", "weights alone"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_operator_on_the_cpu_is_plain_arithmetic(
    step: Step, is_sorted: bool, way: str, rows_fp8: bool
) -> None:
    given, y = step.choices(is_sorted), step.layer()[3]
    quant, (a, b, x) = quantize(step, way, rows_fp8)
    wanted = step.answer(a, b, x, y, given)
    arguments = step.arguments(None, None, None, y, {**given, "num_active_loras": step.max_loras + 1})
    ours.fused_moe_lora_fp8(**{**arguments, **quant})
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_fp8", [True, False], ids=["FP8 x FP8", "weights alone"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
def test_kernels(is_sorted: bool, way: str, rows_fp8: bool) -> None:
    step = STEPS["gate and up" if rows_fp8 else "down, a rank of two groups"]
    given, (y, quant) = step.choices(is_sorted), (step.layer()[3], quantize(step, way, rows_fp8)[0])
    group, _ = WAYS[way]
    outputs = []
    for form, device, options in (
        (launch, DEVICE, {"config": CONFIG}),
        (reference, "cpu", {}),
    ):
        there = {name: to_device(value, device) for name, value in quant.items()}
        scalings = [
            Scaling(tuple(four(scale) for scale in there[f"{name}_scale_stacked"]), rows, *group)
            for name, rows in (("lora_a", there.get("shrink_act_scale")), ("lora_b", None))
        ]
        choices, out = choices_of(step, there["lora_a_stacked"], given, device), to_device(y, device)
        routed = to_device(given["topk_weights"], device) if step.by_pair else None
        form.fused(
            out.view(choices.num_pairs, -1), there["qcurr_hidden_states"], there["lora_a_stacked"],
            there["lora_b_stacked"], choices, 1 if step.by_pair else step.topk, 0, routed, True, *scalings,
            **options,
        )  # fmt: skip
        outputs.append(out.cpu())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def four(scales: Tensor) -> Tensor:
    return scales[:, :, None, None] if scales.dim() == 2 else scales


@pytest.mark.parametrize("way", WAYS)
def test_shrink_and_expand_by_themselves(way: str) -> None:
    """And with scales of the rows between them."""
    step = STEPS["down, a rank of two groups"]
    given, y = step.choices(True), step.layer()[3]
    quant, (a, b, x) = quantize(step, way, True)
    between = torch.rand(step.tokens * step.topk, 1) + 0.5
    wanted = step.answer(a, b, x * between, y, given)
    common = {**halves(step, given, False), "num_active_loras": step.max_loras + 1, **WAYS[way][1]}
    common = {name: value for name, value in common.items() if name != "use_tma"} | {"use_fp8_w8a8": True}
    cache = torch.zeros(step.slices, step.tokens, step.topk, step.rank)
    ours.fused_moe_lora_shrink_fp8(
        cache, quant["qcurr_hidden_states"], quant["lora_a_stacked"], **common,
        lora_a_scale_stacked=quant["lora_a_scale_stacked"], act_scale=quant["shrink_act_scale"],
    )  # fmt: skip
    ours.fused_moe_lora_expand_fp8(
        y, cache, quant["lora_b_stacked"], **common, max_lora_rank=step.rank, w1_output_dim_size=step.out,
        lora_b_scale_stacked=quant["lora_b_scale_stacked"], act_scale=between,
    )  # fmt: skip
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def test_without_quantization_it_is_the_plain_operation() -> None:
    step = STEPS["gate and up"]
    given, (a, b, x, y) = step.choices(True), step.layer()
    wanted = step.answer(a, b, x, y, given)
    arguments = step.arguments(a, b, x, y, {**given, "num_active_loras": step.max_loras + 1})
    ours.fused_moe_lora_fp8(**arguments, lora_a_scale_stacked=[], lora_b_scale_stacked=[])
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[str, object]] = {
    "int8": ("use_int8_w8a8", True),
    "int8 weights": ("use_int8_w8a16", True),
    "a block of one size": ("block_shape", [16]),
    "a block that no step is in": ("group_k", {"block_shape": [16, 24]}),
    "scales of another form": ("lora_a_scale_stacked[0]", {"per_channel_quant": True}),
    "too few scales": ("lora_b_scale_stacked", []),
    "scales of fewer rows": ("shrink_act_scale", torch.ones(2, 1)),
    "rows of another FP8": ("qcurr_hidden_states", torch.ones(4, 40).to(torch.float8_e5m2)),
    "scales without FP8": ("lora_a_stacked", {"use_fp8_w8a8": False}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_named(what: str) -> None:
    step = STEPS["gate and up"]
    given, y = step.choices(True), step.layer()[3]
    quant, _ = quantize(step, "tensor", True)
    if what == "a block that no step is in":
        shape = (step.max_loras, step.experts, 2, 2)
        quant["lora_a_scale_stacked"] = [torch.ones(shape)] * 2
    arguments = step.arguments(None, None, None, y, {**given, "num_active_loras": step.max_loras + 1})
    named, value = REFUSED[what]
    wrong = value if isinstance(value, dict) else {named: value}
    with pytest.raises(KernelArgumentError) as caught:
        ours.fused_moe_lora_fp8(**{**arguments, **quant, **wrong})
    assert caught.value.argument == named
