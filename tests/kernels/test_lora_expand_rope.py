"""qkv's expand with rotation and the cache's write: reference and Triton form against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.follower import PagedCache
from kernels.lora_expand_rope import lora_expand_rope
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.work_list import Run
from kernels.reference import lora_expand_rope as reference
from tests.kernels.followers import PLANS, PREFILL, REPLAYED, STEPS, Step, assert_near, make_step
from tests.kernels.stack import DEVICE, DTYPES

HEAD, HEADS, KV_HEADS = 16, 9, 3
WIDTHS = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
BLOCK_SIZE = 4


def inputs(step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """y, cos, sin."""
    angles = torch.rand(step.rows, HEAD // 2) * 6
    return torch.randn(step.rows, sum(WIDTHS)).to(dtype), angles.cos(), angles.sin()


def make_cache(step: Step, dtype: torch.dtype) -> PagedCache:
    """Rows at shuffled places of a cache with other layers' planes between; the first row is nobody's."""
    blocks = step.rows // BLOCK_SIZE + 2
    data = torch.full((3, blocks, BLOCK_SIZE, KV_HEADS, HEAD), 7.0, dtype=dtype)[::2]
    slots = torch.randperm(blocks * BLOCK_SIZE)[: step.rows]
    slots[:1] = -1
    return PagedCache(data, slots)


def expected(step: Step, y: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """float64 q, k, v, each [rows, heads, head]."""
    parts = [part.double() + step.delta(s) for s, part in enumerate(y.split(WIDTHS, dim=1))]
    q, k, v = (part.unflatten(1, (-1, HEAD)) for part in parts)
    turn = torch.complex(cos, sin).to(torch.complex128)[:, None]
    turned = [torch.complex(x[..., : HEAD // 2], x[..., HEAD // 2 :]) * turn for x in (q, k)]
    return [*(torch.cat((x.real, x.imag), dim=-1) for x in turned), v]


def check_answer(
    y: Tensor, before: Tensor, cache: PagedCache | None, wanted: list[Tensor], dtype: torch.dtype
) -> None:
    q, k, v = (part.flatten(1) for part in wanted)
    if cache is None:
        assert_near(y, torch.cat((q, k, v), dim=1), dtype)
        return
    assert_near(y[:, : WIDTHS[0]], q, dtype)
    assert torch.equal(y[:, WIDTHS[0] :].cpu(), before[:, WIDTHS[0] :])
    slots, planes = cache.kv_slots.cpu(), cache.data.cpu().flatten(3).flatten(1, 2)
    written = slots >= 0
    assert_near(planes[0, slots[written]], k[written], dtype)
    assert_near(planes[1, slots[written]], v[written], dtype)
    others = torch.ones(planes.shape[1], dtype=torch.bool)
    others[slots[written]] = False
    assert (planes[:, others] == 7).all()


def run(step: Step, given: tuple[Tensor, Tensor, Tensor], cache: PagedCache | None) -> Tensor:
    y, cos, sin = (tensor.clone().to(DEVICE) for tensor in given)
    there, meta = step.stack.to(DEVICE), step.meta(DEVICE)
    lora_expand_rope(y, step.h.to(DEVICE), there.lora_b, there.ranks, cos, sin, meta, cache)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["in y", "in the cache"])
@pytest.mark.parametrize("runs", [*STEPS.values(), PREFILL], ids=[*STEPS, "prefill"])
def test_equals_the_row_by_row_answer(runs: list[Run], cached: bool, dtype: torch.dtype) -> None:
    step = make_step(runs, WIDTHS, dtype)
    given = inputs(step, dtype)
    wanted, cache = expected(step, *given), make_cache(step, dtype) if cached else None
    stack, y = step.stack, given[0].clone()
    there = None
    if cache is not None:
        data = torch.empty(3, *cache.data.shape[1:], dtype=dtype, device=DEVICE)[::2]
        there = PagedCache(data.copy_(cache.data), cache.kv_slots.to(DEVICE))
    reference.lora_expand_rope(y, step.h, stack.lora_b, stack.ranks, *given[1:], step.meta("cpu"), cache)
    check_answer(y, given[0], cache, wanted, dtype)
    check_answer(run(step, given, there), given[0], there, wanted, dtype)


@pytest.mark.parametrize("plan", PLANS, ids=["one row", "shared"])
@pytest.mark.parametrize("runs", REPLAYED, ids=["one adapter", "all and base", "base"])
def test_one_plan_serves_steps_with_other_adapters(runs: list[Run], plan: LaunchPlan) -> None:
    step = make_step(runs, WIDTHS, torch.float32, plan)
    given = inputs(step, torch.float32)
    check_answer(run(step, given, None), given[0], None, expected(step, *given), torch.float32)


def test_adds_up_the_splits_of_h() -> None:
    step = make_step([(1, 3), (5, 1), (-1, 2)], WIDTHS, torch.float32)
    given, share = inputs(step, torch.float32), torch.rand(step.h.shape)
    split = Step(step.stack, step.runs, torch.stack((step.h * share, step.h * (1 - share))))
    check_answer(run(split, given, None), given[0], None, expected(step, *given), torch.float32)


WRONG: dict[str, Callable[[Tensor], object]] = {
    "y": lambda y: y[:-1],
    "h": lambda h: h[:2],
    "lora_b": lambda b: b[:2],
    "ranks": lambda ranks: ranks[:2],
    "cos": lambda cos: cos[:-1],
    "sin": lambda sin: sin.half(),
    "cache.data": lambda data: data[:, :, :, :-1],
    "cache.kv_slots": lambda slots: slots.int(),
}


@pytest.mark.parametrize("argument", WRONG)
def test_every_argument_is_checked_by_name(argument: str) -> None:
    step = make_step([(1, 2), (2, 1)], WIDTHS, torch.float32)
    there, meta, cache = step.stack.to(DEVICE), step.meta(DEVICE), make_cache(step, torch.float32)
    y, cos, sin = (tensor.to(DEVICE) for tensor in inputs(step, torch.float32))
    arguments = {
        "y": y, "h": step.h.to(DEVICE), "lora_b": there.lora_b, "ranks": there.ranks, "cos": cos, "sin": sin,
        "cache.data": cache.data.to(DEVICE), "cache.kv_slots": cache.kv_slots.to(DEVICE),
    }  # fmt: skip

    def call() -> None:
        plain = {name: value for name, value in arguments.items() if "." not in name}
        paged = PagedCache(arguments["cache.data"], arguments["cache.kv_slots"])
        lora_expand_rope(**plain, meta=meta, cache=paged)

    call()
    arguments[argument] = WRONG[argument](arguments[argument])
    with pytest.raises(KernelArgumentError) as caught:
        call()
    assert caught.value.argument == argument
