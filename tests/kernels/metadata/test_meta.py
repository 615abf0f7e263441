from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.errors import KernelArgumentError
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run
from tests.kernels.stack import row_slots

RUNS = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 7)), max_size=32)


def test_running_example() -> None:
    meta = LoRAKernelMeta.make(4, 16, "cpu")
    meta.prepare_tensors([(2, 3), (-1, 1), (0, 2), (2, 1)])
    assert meta.token_lora_mapping.tolist() == [2, 2, 2, -1, 0, 0, 2] + [-1] * 9
    assert meta.token_indices_sorted_by_lora_ids.tolist()[:7] == [4, 5, 0, 1, 2, 6, 3]
    assert meta.lora_ids.tolist() == [0, 2, -1, -1]
    assert meta.num_tokens_per_lora.tolist() == [2, 4, 0, 0]
    assert meta.lora_token_start_loc.tolist() == [0, 2, 6, 6, 6]
    assert (meta.num_rows, meta.num_active_loras, meta.no_lora_flag_cpu) == (7, 2, False)
    first, second = meta.groups
    assert (first.slot, first.rows) == (0, slice(4, 6))
    assert isinstance(second.rows, torch.Tensor)
    assert second.rows.tolist() == [0, 1, 2, 6]


def check(meta: LoRAKernelMeta, runs: list[Run]) -> None:
    """Every row is in exactly one place; the segments hold exactly their slot's rows."""
    slots = row_slots(runs)
    active = sorted({slot for slot in slots if slot >= 0})
    order = meta.token_indices_sorted_by_lora_ids.tolist()
    assert meta.token_lora_mapping.tolist() == slots + [-1] * (meta.max_num_tokens - len(slots))
    assert sorted(order[: len(slots)]) == list(range(len(slots)))
    assert meta.lora_ids.tolist() == active + [-1] * (meta.max_loras - len(active))
    idle = meta.max_loras - len(active)
    counts = [slots.count(slot) for slot in active]
    assert meta.num_tokens_per_lora.tolist() == counts + [0] * idle
    starts = meta.lora_token_start_loc.tolist()
    assert starts == [*accumulate(counts, initial=0), *[sum(counts)] * idle]
    for place, slot in enumerate(active):
        rows = [row for row, owner in enumerate(slots) if owner == slot]
        assert order[starts[place] : starts[place + 1]] == rows
        group = meta.groups[place]
        assert (group.slot, group.start, group.count) == (slot, starts[place], len(rows))
        assert torch.arange(len(slots))[group.rows].tolist() == rows
    assert all(slots[row] == -1 for row in order[starts[-1] : len(slots)])
    assert len(meta.groups) == meta.num_active_loras == len(active)
    assert meta.no_lora_flag_cpu == (not active)


@given(steps=st.lists(RUNS, min_size=1, max_size=4))
def test_each_step_is_described_alone_whatever_came_before(steps: list[list[Run]]) -> None:
    meta = LoRAKernelMeta.make(6, 32 * 7, "cpu")
    buffers = [meta.token_lora_mapping.data_ptr(), meta.lora_ids.data_ptr()]
    for runs in steps:
        meta.prepare_tensors(runs)
        check(meta, runs)
    assert buffers == [meta.token_lora_mapping.data_ptr(), meta.lora_ids.data_ptr()]


@given(steps=st.lists(RUNS, min_size=1, max_size=3))
def test_runs_as_an_array_say_the_same(steps: list[list[Run]]) -> None:
    meta = LoRAKernelMeta.make(6, 32 * 7, "cpu")
    for runs in steps:
        meta.prepare_tensors(np.array(runs, dtype=np.int32).reshape(-1, 2))
        check(meta, runs)


@pytest.mark.parametrize(
    "runs", [np.zeros((2, 2), dtype=np.int64), np.zeros(4, dtype=np.int32), np.zeros((2, 3), dtype=np.int32)]
)
def test_an_array_of_another_form_is_refused(runs: np.ndarray) -> None:
    with pytest.raises(KernelArgumentError, match=r"^runs must be int32 \[runs, 2\]"):
        LoRAKernelMeta.make(4, 16, "cpu").prepare_tensors(runs)


@pytest.mark.parametrize(
    "plan", [LaunchPlan.for_graph(700, 4, rows_per_item=1), LaunchPlan(16, 8, 4, 17, False)]
)
def test_a_plan_larger_than_the_buffers_is_refused(plan: LaunchPlan) -> None:
    """Its programs would find other fields behind the lists."""
    meta = LoRAKernelMeta.make(4, 700, "cpu")
    meta.prepare_tensors([(3, 2)])
    with pytest.raises(KernelArgumentError, match=r"^plan .* larger than the buffers"):
        meta.prepare_tensors([(0, 1)], plan)
    check(meta, [(3, 2)])


@pytest.mark.parametrize(
    ("runs", "problem"),
    [([(4, 1)], "slot"), ([(-2, 1)], "slot"), ([(0, -1)], "negative"), ([(0, 9), (1, 8)], "17 rows")],
)
def test_bad_runs_are_refused_and_the_last_step_stays(runs: list[Run], problem: str) -> None:
    meta = LoRAKernelMeta.make(4, 16, "cpu")
    meta.prepare_tensors([(3, 2)])
    with pytest.raises(KernelArgumentError, match=f"runs .*{problem}"):
        meta.prepare_tensors(runs)
    check(meta, [(3, 2)])
