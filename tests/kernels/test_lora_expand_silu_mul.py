"""gate_up's expand with SiLU-and-multiply: reference and Triton form against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.follower_tuning import FollowerConfig
from kernels.lora_expand_silu_mul import lora_expand_silu_mul
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.work_list import Run
from kernels.reference import lora_expand_silu_mul as reference
from tests.kernels.followers import PLANS, PREFILL, REPLAYED, STEPS, Step, assert_near, make_step
from tests.kernels.stack import DEVICE, DTYPES

WIDTH = 150


def expected(step: Step, y: Tensor) -> Tensor:
    gate, up = (y[:, WIDTH * s : WIDTH * (s + 1)].double() + step.delta(s) for s in range(2))
    return torch.nn.functional.silu(gate) * up


def run(step: Step, y: Tensor, config: FollowerConfig | None = None) -> Tensor:
    there, out = step.stack.to(DEVICE), torch.full((step.rows, WIDTH), torch.nan, dtype=y.dtype)
    out = out.to(DEVICE)
    h = step.h.to(DEVICE)
    lora_expand_silu_mul(out, y.to(DEVICE), h, there.lora_b, there.ranks, step.meta(DEVICE), config)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runs", [*STEPS.values(), PREFILL], ids=[*STEPS, "prefill"])
def test_equals_the_row_by_row_answer(runs: list[Run], dtype: torch.dtype) -> None:
    step = make_step(runs, [WIDTH, WIDTH], dtype)
    y = torch.randn(step.rows, 2 * WIDTH).to(dtype)
    assert_near(run(step, y), expected(step, y), dtype)
    out = torch.full((step.rows, WIDTH), torch.nan, dtype=dtype)
    stack = step.stack
    reference.lora_expand_silu_mul(out, y, step.h, stack.lora_b, stack.ranks, step.meta("cpu"))
    assert_near(out, expected(step, y), dtype)


@pytest.mark.parametrize("plan", PLANS, ids=["one row", "shared"])
@pytest.mark.parametrize("runs", REPLAYED, ids=["one adapter", "all and base", "base"])
def test_one_plan_serves_steps_with_other_adapters(runs: list[Run], plan: LaunchPlan) -> None:
    step = make_step(runs, [WIDTH, WIDTH], torch.float32, plan)
    y = torch.randn(step.rows, 2 * WIDTH)
    assert_near(run(step, y), expected(step, y), torch.float32)


def test_adds_up_the_splits_of_h() -> None:
    step = make_step([(1, 3), (5, 1), (-1, 2)], [WIDTH, WIDTH], torch.float32)
    y, share = torch.randn(step.rows, 2 * WIDTH), torch.rand(step.h.shape)
    split = Step(step.stack, step.runs, torch.stack((step.h * share, step.h * (1 - share))))
    assert_near(run(split, y), expected(step, y), torch.float32)


WRONG: dict[str, Callable[[Tensor], object]] = {
    "out": lambda out: out.T.contiguous().T,
    "y": lambda y: y[:-1],
    "h": lambda h: h[:1],
    "lora_b": lambda b: b[:1],
    "ranks": lambda ranks: ranks.long(),
}


@pytest.mark.parametrize("argument", WRONG)
def test_every_argument_is_checked_by_name(argument: str) -> None:
    step = make_step([(1, 2), (2, 1)], [WIDTH, WIDTH], torch.float32)
    there, meta = step.stack.to(DEVICE), step.meta(DEVICE)
    arguments = {
        "out": torch.zeros(3, WIDTH, device=DEVICE),
        "y": torch.zeros(3, 2 * WIDTH, device=DEVICE),
        "h": step.h.to(DEVICE),
        "lora_b": there.lora_b,
        "ranks": there.ranks,
    }
    lora_expand_silu_mul(**arguments, meta=meta)
    arguments[argument] = WRONG[argument](arguments[argument])
    with pytest.raises(KernelArgumentError) as caught:
        lora_expand_silu_mul(**arguments, meta=meta)
    assert caught.value.argument == argument
