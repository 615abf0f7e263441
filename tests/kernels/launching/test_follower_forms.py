"""Which form a step's layers take, by its plan."""

import pytest

from kernels.launching.follower_tuning import Follower, Form, beside_pays, best_form
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run

STEPS: dict[str, tuple[list[Run], dict[Follower, Form]]] = {
    "one token": ([(0, 1)], {"add_rms_norm": "beside", "silu_mul": "beside", "rope": "beside"}),
    "shared by few": (
        [(slot, 8) for slot in range(8)],
        {"add_rms_norm": "beside", "silu_mul": "beside", "rope": "beside"},
    ),
    "all distinct": (
        [(slot, 1) for slot in range(64)],
        {"add_rms_norm": "beside", "silu_mul": "beside", "rope": "beside"},
    ),
    "shared by some": (
        [(slot, 4) for slot in range(16)],
        {"add_rms_norm": "beside", "silu_mul": "beside", "rope": "beside"},
    ),
    "shared by more": (
        [(slot, 4) for slot in range(30)],
        {"add_rms_norm": "fused", "silu_mul": "fused", "rope": "fused"},
    ),
    "shared by many": (
        [(slot, 4) for slot in range(64)],
        {"add_rms_norm": "pair", "silu_mul": "fused", "rope": "pair"},
    ),
    "prefill": (
        [(slot, 128) for slot in range(8)],
        {"add_rms_norm": "pair", "silu_mul": "fused", "rope": "fused"},
    ),
    "long prefill": (
        [(slot, 1024) for slot in range(8)],
        {"add_rms_norm": "pair", "silu_mul": "beside", "rope": "beside"},
    ),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("follower", ["silu_mul", "add_rms_norm", "rope"])
def test_the_measured_form_is_chosen(name: str, follower: Follower) -> None:
    runs, forms = STEPS[name]
    meta = LoRAKernelMeta.make(64, 8192, "cpu")
    meta.prepare_tensors(runs)
    assert best_form(meta.plan, follower) == forms[follower]


@pytest.mark.parametrize("own", [8, 64, 320])
@pytest.mark.parametrize("follower", ["silu_mul", "add_rms_norm", "rope"])
def test_a_prompt_without_an_adapter_takes_the_pair(own: int, follower: Follower) -> None:
    """The fused followers of a few rows with adapters were up to a millisecond slower."""
    meta = LoRAKernelMeta.make(64, 8192, "cpu")
    meta.prepare_tensors([(-1, 8192 - own), *((slot, own // 8) for slot in range(8))])
    assert best_form(meta.plan, follower) == "pair"


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("rows_per_item", [1, 16])
def test_a_captured_step_may_hold_rows_without_an_adapter(rows: int, rows_per_item: int) -> None:
    plan = LaunchPlan.for_graph(rows, 64, rows_per_item=rows_per_item)
    assert plan.base_rows == rows
    assert best_form(plan, "silu_mul") != "pair"


@pytest.mark.parametrize("rows", [4, 8, 64])
def test_high_ranks_in_parts_take_the_pair(rows: int) -> None:
    """One program does all ranks of such an item in the fused followers."""
    meta = LoRAKernelMeta.make(64, 1024, "cpu")
    meta.slot_ranks[:] = [256, *[8] * 63]
    for count in (1, 2):
        meta.prepare_tensors([(0, 1), *((slot, count) for slot in range(1, rows))])
        assert meta.plan.parts
        assert best_form(meta.plan, "silu_mul") == "pair"
        assert not beside_pays(meta.plan)


@pytest.mark.parametrize(
    ("runs", "pays"),
    [
        ([(0, 64)], True),
        ([(slot, 4) for slot in range(16)], True),
        ([(slot, 4) for slot in range(30)], False),
        ([(slot, 1) for slot in range(64)], True),
        ([(slot, 4) for slot in range(64)], False),
        ([(0, 512)], False),
        ([(0, 8192)], True),
    ],
)
def test_shrink_runs_beside_the_product_where_that_was_faster(runs: list[Run], pays: bool) -> None:
    meta = LoRAKernelMeta.make(64, 8192, "cpu")
    meta.prepare_tensors(runs)
    assert beside_pays(meta.plan) == pays
