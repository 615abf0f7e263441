"""o's and down's expand with residual-add and RMSNorm: reference and Triton form against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.follower_tuning import NormConfig
from kernels.lora_expand_add_rms_norm import lora_expand_add_rms_norm
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.work_list import Run
from kernels.reference import lora_expand_add_rms_norm as reference
from tests.kernels.followers import PLANS, PREFILL, REPLAYED, STEPS, Step, assert_near, make_step
from tests.kernels.stack import DEVICE, DTYPES

HIDDEN, EPS = 200, 1e-3
CONFIG = NormConfig(8, 1)  # fewer ranks at once than adapters have


def inputs(step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """y, residual, weight."""
    y, residual = torch.randn(2, step.rows, HIDDEN).to(dtype)
    return y, residual, (torch.rand(HIDDEN) + 0.5).to(dtype)


def check_answer(step: Step, got: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor, Tensor]) -> None:
    y, residual, weight = given
    total = residual.double() + y.double() + step.delta(0)
    normal = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_near(got[0], normal, y.dtype)
    assert_near(got[1], total, y.dtype)


def run(
    step: Step, given: tuple[Tensor, Tensor, Tensor], config: NormConfig | None = None
) -> tuple[Tensor, Tensor]:
    y, residual, weight = (tensor.clone().to(DEVICE) for tensor in given)
    there, out = step.stack.to(DEVICE), torch.full_like(y, torch.nan)
    h, meta = step.h.to(DEVICE), step.meta(DEVICE)
    lora_expand_add_rms_norm(out, residual, y, h, there.lora_b[0], there.ranks, weight, EPS, meta, config)
    return out, residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runs", [*STEPS.values(), PREFILL], ids=[*STEPS, "prefill"])
def test_equals_the_row_by_row_answer(runs: list[Run], dtype: torch.dtype) -> None:
    step = make_step(runs, [HIDDEN], dtype)
    given = inputs(step, dtype)
    check_answer(step, run(step, given), given)


@pytest.mark.parametrize("runs", [*STEPS.values(), PREFILL], ids=[*STEPS, "prefill"])
def test_reference_equals_the_row_by_row_answer(runs: list[Run]) -> None:
    step = make_step(runs, [HIDDEN], torch.float32)
    y, residual, weight = given = inputs(step, torch.float32)
    residual, out, stack = residual.clone(), torch.full_like(y, torch.nan), step.stack
    reference.lora_expand_add_rms_norm(
        out, residual, y, step.h, stack.lora_b[0], stack.ranks, weight, EPS, step.meta("cpu")
    )
    check_answer(step, (out, residual), given)


@pytest.mark.parametrize("plan", PLANS, ids=["one row", "shared"])
@pytest.mark.parametrize("runs", REPLAYED, ids=["one adapter", "all and base", "base"])
def test_one_plan_serves_steps_with_other_adapters(runs: list[Run], plan: LaunchPlan) -> None:
    step = make_step(runs, [HIDDEN], torch.float32, plan)
    given = inputs(step, torch.float32)
    check_answer(step, run(step, given), given)


def test_adds_up_the_splits_of_h() -> None:
    step = make_step([(1, 13), (5, 1), (-1, 2)], [HIDDEN], torch.float32)
    given, share = inputs(step, torch.float32), torch.rand(step.h.shape)
    split = Step(step.stack, step.runs, torch.stack((step.h * share, step.h * (1 - share))))
    check_answer(step, run(split, given, CONFIG), given)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "out": lambda out: out.half(),
    "residual": lambda residual: residual[:-1],
    "y": lambda y: y[:-1],
    "h": lambda h: h.repeat(2, 1, 1),
    "lora_b": lambda b: b[:, :, :-1],
    "ranks": lambda ranks: ranks.repeat(2, 1),
    "weight": lambda weight: weight[:-1],
}


@pytest.mark.parametrize("argument", WRONG)
def test_every_argument_is_checked_by_name(argument: str) -> None:
    step = make_step([(1, 2), (2, 1)], [HIDDEN], torch.float32)
    there, meta = step.stack.to(DEVICE), step.meta(DEVICE)
    y, residual, weight = (tensor.to(DEVICE) for tensor in inputs(step, torch.float32))
    arguments = {
        "out": torch.zeros_like(y),
        "residual": residual,
        "y": y,
        "h": step.h.to(DEVICE),
        "lora_b": there.lora_b[0],
        "ranks": there.ranks,
        "weight": weight,
    }
    lora_expand_add_rms_norm(**arguments, eps=EPS, meta=meta)
    arguments[argument] = WRONG[argument](arguments[argument])
    with pytest.raises(KernelArgumentError) as caught:
        lora_expand_add_rms_norm(**arguments, eps=EPS, meta=meta)
    assert caught.value.argument == argument


def test_rows_wider_than_a_program_are_refused() -> None:
    step = make_step([(1, 1)], [8200], torch.float32)
    y, there = torch.zeros(1, 8200, device=DEVICE), step.stack.to(DEVICE)
    h, meta = step.h.to(DEVICE), step.meta(DEVICE)
    with pytest.raises(KernelArgumentError, match=r"^y has 8200 columns"):
        lora_expand_add_rms_norm(y.clone(), y.clone(), y, h, there.lora_b[0], there.ranks, y[0], EPS, meta)
