"""The description in C, against numpy's, field by field."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.errors import KernelArgumentError
from kernels.metadata import native
from kernels.metadata.host_fields import HostFields
from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import field_sizes
from kernels.metadata.work_list import Run, describe

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler")
SLOTS, ROWS = 6, 32 * 70
RUNS = st.lists(st.tuples(st.integers(-1, SLOTS - 1), st.sampled_from([0, 1, 1, 3, 17, 70])), max_size=32)
RANKS = st.lists(st.sampled_from([0, 1, 8, 9, 16, 64, 65, 256]), min_size=SLOTS, max_size=SLOTS)
SIZES = field_sizes(SLOTS, ROWS)
ITEMS = SIZES[0] // 4


@pytest.fixture(scope="module")
def module() -> Any:
    return native.load()


def test_where_it_cannot_be_compiled_there_is_none_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A place of compiled code that nobody can write to; a compiler there is."""
    (tmp_path / "cache").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert native.load.__wrapped__() is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("kernels/metadata/work_list.c is not compiled")
    assert "Not a directory" in message


def make_fields() -> HostFields:
    return HostFields(np.full(sum(SIZES), 99, dtype=np.int32), SIZES)


@given(steps=st.lists(RUNS, min_size=1, max_size=4), ranks=RANKS, under=st.sampled_from([None, 1, 16]))
def test_each_step_is_written_as_numpy_writes_it(
    module: Any, steps: list[list[Run]], ranks: list[int], under: int | None
) -> None:
    expected, got = make_fields(), make_fields()
    slot_ranks = np.array(ranks, dtype=np.int32)
    for runs in steps:
        rows = sum(count for _, count in runs)
        plan = LaunchPlan.for_graph(rows, SLOTS, rows_per_item=under, parts=True) if under else None
        if under == 1 and rows > ITEMS:
            continue
        wanted = describe(runs, SLOTS, ROWS, ITEMS, slot_ranks, plan)
        work = native.describe(module, runs, SLOTS, ROWS, ITEMS, slot_ranks, plan)
        assert (work.plan, work.num_rows, work.num_active) == (
            wanted.plan,
            wanted.num_rows,
            wanted.num_active,
        )
        wanted.write(expected)
        work.write(got)
        np.testing.assert_array_equal(got.buffer, expected.buffer)
        np.testing.assert_array_equal(got.used, expected.used)


@pytest.mark.parametrize(
    ("runs", "problem"),
    [([(SLOTS, 1)], "slot"), ([(-2, 1)], "slot"), ([(0, -1)], "negative"), ([(0, ROWS), (1, 1)], "rows")],
)
def test_what_numpy_refuses_is_refused(module: Any, runs: list[Run], problem: str) -> None:
    ranks = np.full(SLOTS, 16, dtype=np.int32)
    with pytest.raises(KernelArgumentError, match=f"runs .*{problem}"):
        native.describe(module, runs, SLOTS, ROWS, ITEMS, ranks, None)


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**63, -(2**63) - 1, None])
def test_numbers_that_are_no_int32_are_refused_as_numpy_refuses_them(module: Any, number: Any) -> None:
    ranks = np.full(SLOTS, 16, dtype=np.int32)
    for runs in (((0, 1), (number, 1)), ((0, number), (1, 1))):
        with pytest.raises((OverflowError, ValueError, TypeError)) as wanted:
            describe(runs, SLOTS, ROWS, ITEMS, ranks, None)
        with pytest.raises(wanted.type):
            native.describe(module, runs, SLOTS, ROWS, ITEMS, ranks, None)


def test_a_list_which_could_change_while_it_is_read_is_left_to_numpy(module: Any) -> None:
    assert module.pairs(((0, 1), (2, 3)), bytearray(16))
    assert not module.pairs([(0, 1), (2, 3)], bytearray(16))


def test_runs_as_pairs_and_as_an_array_are_written_alike(module: Any) -> None:
    """-1 is what Python's C functions also say for an error."""
    runs = ((-1, 3), (SLOTS - 1, 1), (0, 0), (2, 70), (-1, 1), (2, 1))
    of_pairs, of_array = make_fields(), make_fields()
    ranks = np.full(SLOTS, 16, dtype=np.int32)
    native.describe(module, runs, SLOTS, ROWS, ITEMS, ranks, None).write(of_pairs)
    array = np.array(runs, dtype=np.int32)
    native.describe(module, array, SLOTS, ROWS, ITEMS, ranks, None).write(of_array)
    np.testing.assert_array_equal(of_pairs.buffer, of_array.buffer)
    assert of_pairs.mapping[:4].tolist() == [-1, -1, -1, SLOTS - 1]


def test_a_described_step_is_written_as_it_was_described(module: Any) -> None:
    """Whatever becomes of the caller's array and of the ranks: C writes as many entries as were counted."""
    ranks, runs = np.full(SLOTS, 8, dtype=np.int32), np.array([(0, 3), (2, 20), (-1, 1)], dtype=np.int32)
    plan = LaunchPlan(16, 8, 40, 0, parts=True, base_rows=1)
    expected, got = make_fields(), make_fields()
    wanted = describe(runs.copy(), SLOTS, ROWS, ITEMS, ranks, plan)
    work = native.describe(module, runs, SLOTS, ROWS, ITEMS, ranks, plan)
    ranks[:], runs[:] = 256, (5, 1)
    wanted.write(expected)
    work.write(got)
    np.testing.assert_array_equal(got.buffer, expected.buffer)


def test_a_plan_that_is_too_small_is_refused(module: Any) -> None:
    plan = LaunchPlan.for_graph(4, 4, rows_per_item=1)
    with pytest.raises(KernelArgumentError, match=r"^plan .* too small for 5 items"):
        native.describe(module, [(0, 5)], SLOTS, ROWS, ITEMS, np.full(SLOTS, 16, dtype=np.int32), plan)


def test_many_high_ranks_do_not_outgrow_the_lists(module: Any) -> None:
    """Parts of them all have no room: they stay whole."""
    ranks = np.array([8] * 48 + [256] * 16, dtype=np.int32)
    sizes = field_sizes(64, 64)
    fields = HostFields(np.zeros(sum(sizes), dtype=np.int32), sizes)
    runs = [(slot, 1) for slot in range(64)]
    for work in (
        describe(runs, 64, 64, sizes[0] // 4, ranks, None),
        native.describe(module, runs, 64, 64, sizes[0] // 4, ranks, None),
    ):
        assert (work.plan.parts, work.plan.items) == (True, 64)
        work.write(fields)
        assert fields.items[:16, 0].tolist() == list(range(48, 64))
