"""DoRA's factors on a layer's output: reference and Triton form against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run
from kernels.reference import scale_outputs as reference
from kernels.scale_outputs import scale_outputs
from tests.kernels.followers import STEPS, assert_near
from tests.kernels.stack import DEVICE, DTYPES, row_slots

SLOTS, WIDTH = 10, 1500  # two tiles
MARKED = (0, 4, 9)
BIASED = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])


def make_tables(marked: tuple[int, ...] = MARKED) -> tuple[Tensor, Tensor]:
    """Factors as a view of a wider table, NaN where a slot has none, and 1 in some columns; marks."""
    factors = torch.full((SLOTS, 3 * WIDTH), torch.nan)[:, WIDTH : 2 * WIDTH]
    marks = torch.full((SLOTS + 1,), -1, dtype=torch.int32)
    for slot in marked:
        factors[slot] = torch.rand(WIDTH) + 0.5
        factors[slot, 700:1100] = 1.0
        marks[slot] = slot % 3
    return factors, marks


def make_meta(runs: list[Run], device: str) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(SLOTS, 64, device)
    meta.prepare_tensors(runs)
    return meta


def expected(y: Tensor, factors: Tensor, marks: Tensor, bias: Tensor | None, runs: list[Run]) -> Tensor:
    out, kept = y.double(), 0.0 if bias is None else bias.double()
    for row, slot in enumerate(row_slots(runs)):
        if slot >= 0 and marks[slot] >= 0:
            out[row] = factors[slot].double() * (out[row] - kept) + kept
    return out


@BIASED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("runs", STEPS.values(), ids=STEPS)
def test_rows_of_marked_slots_are_multiplied(runs: list[Run], dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    factors, marks = make_tables()
    rows = len(row_slots(runs))
    before = torch.randn(rows, WIDTH + 4).to(dtype)
    bias = torch.randn(WIDTH).to(dtype) if biased else None
    wanted = expected(before[:, :WIDTH], factors, marks, bias, runs)
    changed = [slot >= 0 and int(marks[slot]) >= 0 for slot in row_slots(runs)]
    for device, run in (("cpu", reference.scale_outputs), (DEVICE, scale_outputs)):
        whole = before.clone().to(device)  # y has strided rows
        there = None if bias is None else bias.to(device)
        run(whole[:, :WIDTH], factors.to(device), marks.to(device), there, make_meta(runs, device))
        assert_near(whole[:, :WIDTH], wanted, dtype)
        same = torch.ones_like(before, dtype=torch.bool)
        same[changed, :700] = same[changed, 1100:WIDTH] = False
        assert torch.equal(whole.cpu()[same], before[same])


def test_a_known_launch_reads_what_the_tables_say_now() -> None:
    torch.manual_seed(0)
    factors, marks = (table.to(DEVICE) for table in make_tables())
    meta = LoRAKernelMeta.make(SLOTS, 64, DEVICE)
    for marked, runs in (((4,), [(4, 3), (1, 2)]), ((1,), [(4, 3), (1, 2)]), ((2, 3), [(2, 1), (-1, 5)])):
        other_factors, other_marks = make_tables(marked)
        factors.copy_(other_factors)
        marks.copy_(other_marks)
        meta.prepare_tensors(runs)
        y = torch.randn(len(row_slots(runs)), WIDTH)
        there = y.clone().to(DEVICE)
        scale_outputs(there, factors, marks, None, meta)
        assert_near(there, expected(y, other_factors, other_marks, None, runs), torch.float32)
    assert len(meta.launches) == 1


def test_slots_out_of_range_in_the_device_buffers_are_ignored() -> None:
    """Also the one behind the last, of which marks has an entry."""
    factors = torch.full((SLOTS + 1, WIDTH), 2.0, device=DEVICE)[:SLOTS]
    marks = torch.zeros(SLOTS + 1, dtype=torch.int32, device=DEVICE)
    meta = make_meta([(4, 4)], DEVICE)
    for row, slot in enumerate((SLOTS, 10**6, -7)):
        meta.token_lora_mapping[row] = slot
    y = torch.ones(4, WIDTH, device=DEVICE)
    scale_outputs(y, factors, marks, None, meta)
    assert y[:, 0].tolist() == [1, 1, 1, 2]


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "y": lambda y: y[:-1],
    "factors": lambda factors: factors[:, 1:],
    "marks": lambda marks: marks[:-1],
    "bias": lambda bias: bias[1:],
}


@pytest.mark.parametrize("argument", WRONG)
@pytest.mark.parametrize("run", [reference.scale_outputs, scale_outputs], ids=["reference", "triton"])
def test_every_argument_is_checked_by_name(run: Callable[..., None], argument: str) -> None:
    device = DEVICE if run is scale_outputs else "cpu"
    factors, marks = (table.to(device) for table in make_tables())
    meta = make_meta([(4, 2), (-1, 1)], device)
    arguments = {
        "y": torch.zeros(3, WIDTH, device=device),
        "factors": factors,
        "marks": marks,
        "bias": torch.zeros(WIDTH, device=device),
    }
    run(**arguments, meta=meta)
    arguments[argument] = WRONG[argument](arguments[argument])
    with pytest.raises(KernelArgumentError) as caught:
        run(**arguments, meta=meta)
    assert caught.value.argument == argument
