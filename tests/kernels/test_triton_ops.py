"""Each Triton operation by itself against its reference, and what its launcher refuses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import lora_embedding, lora_expand, lora_shrink
from kernels.errors import KernelArgumentError
from kernels.launching.tuning import ExpandConfig
from kernels.metadata.meta import LoRAKernelMeta, LoRAMapping
from kernels.metadata.work_list import Run
from kernels.punica_gpu import PunicaWrapperGPU
from kernels.reference import lora_embedding as reference_embedding
from kernels.reference import lora_expand as reference_expand
from kernels.reference import lora_shrink as reference_shrink
from tests.kernels.stack import DEVICE, UNWRITTEN, make_stack, row_slots, unwritten_hidden

RUNS = [(1, 2), (-1, 1), (2, 20), (1, 1), (0, 3)]
ROWS = 27
RANKS = [[1, 5, 8], [3, 0, 8]]


def prepared(device: str, runs: list[Run] = RUNS, max_rows: int = 64) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(3, max_rows, device)
    meta.prepare_tensors(runs)
    return meta


@pytest.mark.parametrize("runs", [RUNS, [(1, 1), (-1, 1), (2, 1), (0, 1)]], ids=["shared", "one row each"])
def test_shrink_writes_what_the_reference_writes_and_nothing_else(runs: list[Run]) -> None:
    torch.manual_seed(0)
    stack = make_stack(RANKS, 333, [7, 9], max_rank=8)
    there, rows = stack.to(DEVICE), len(row_slots(runs))
    x, expected = torch.randn(rows, 333), unwritten_hidden(stack, rows)
    got = expected.clone().to(DEVICE)
    reference_shrink.lora_shrink(expected, x, stack.lora_a, stack.ranks, stack.scales, prepared("cpu", runs))
    lora_shrink.lora_shrink(
        got, x.to(DEVICE), there.lora_a, there.ranks, there.scales, prepared(DEVICE, runs)
    )
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.cpu() == UNWRITTEN, expected == UNWRITTEN)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "output_scale"])
@pytest.mark.parametrize("add_inputs", [True, False])
@pytest.mark.parametrize("runs", [RUNS, [(1, 1), (-1, 1), (2, 1), (0, 1)]], ids=["shared", "one row each"])
def test_expand_changes_what_the_reference_changes(runs: list[Run], add_inputs: bool, scaled: bool) -> None:
    torch.manual_seed(0)
    stack = make_stack(RANKS, 4, [150, 9], max_rank=8)
    there, rows = stack.to(DEVICE), len(row_slots(runs))
    h, y = torch.randn(2, rows, 8), torch.randn(rows, 170)
    scale = torch.rand(3, 159) if scaled else None
    got = y.clone().to(DEVICE)
    arguments = {"add_inputs": add_inputs, "output_scale": scale}
    starts = stack.column_starts
    reference_expand.lora_expand(y, h, stack.lora_b, stack.ranks, starts, prepared("cpu", runs), **arguments)
    arguments["output_scale"] = scale if scale is None else scale.to(DEVICE)
    lora_expand.lora_expand(
        got, h.to(DEVICE), there.lora_b, there.ranks, starts, prepared(DEVICE, runs), **arguments
    )
    torch.testing.assert_close(got.cpu(), y, rtol=1e-5, atol=1e-5)


def test_expand_adds_up_the_splits_of_h() -> None:
    torch.manual_seed(0)
    stack = make_stack(RANKS, 4, [30, 9], max_rank=8)
    there, meta, h = stack.to(DEVICE), prepared(DEVICE), torch.randn(3, 2, ROWS, 8, device=DEVICE)
    whole, split = torch.zeros(2, ROWS, 60, device=DEVICE)
    starts = stack.column_starts
    lora_expand.lora_expand(whole, h.sum(0), there.lora_b, there.ranks, starts, meta)
    lora_expand.lora_expand(split, h, there.lora_b, there.ranks, starts, meta)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)


def test_expand_over_tiles_of_64_rows() -> None:
    torch.manual_seed(0)
    runs = [(1, 300), (-1, 20), (0, 230), (1, 3)]
    stack, rows = make_stack(RANKS, 5, [40, 9], max_rank=8), len(row_slots(runs))
    there, meta = stack.to(DEVICE), prepared(DEVICE, runs, rows)
    assert meta.plan.tiles == 9
    h, expected = torch.randn(2, rows, 8), torch.randn(rows, 60)
    got = expected.clone().to(DEVICE)
    reference = prepared("cpu", runs, rows)
    reference_expand.lora_expand(expected, h, stack.lora_b, stack.ranks, stack.column_starts, reference)
    arguments = (got, h.to(DEVICE), there.lora_b, there.ranks, there.column_starts, meta)
    lora_expand.lora_expand(*arguments, config=ExpandConfig(64, 16, 32, 4))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelArgumentError, match=r"^config is for entries of 1 rows"):
        lora_expand.lora_expand(*arguments, config=ExpandConfig(1, 16, 32, 4))


@pytest.mark.parametrize("runs", [RUNS, [(1, 1), (-1, 1), (2, 1), (0, 1)]], ids=["shared", "one row each"])
def test_embedding_gathers_what_the_reference_gathers(runs: list[Run]) -> None:
    torch.manual_seed(0)
    stack = make_stack([[20, 0, 40]], 90, [7], max_rank=40)
    there, rows = stack.to(DEVICE), len(row_slots(runs))
    tokens, expected = torch.randint(0, 90, (rows,)), unwritten_hidden(stack, rows)
    got = expected.clone().to(DEVICE)
    reference_embedding.lora_embedding(
        expected, tokens, stack.lora_a[0], stack.ranks, stack.scales, prepared("cpu", runs)
    )
    lora_embedding.lora_embedding(
        got, tokens.to(DEVICE), there.lora_a[0], there.ranks, there.scales, prepared(DEVICE, runs)
    )
    assert torch.equal(got.cpu(), expected)


def test_wrapper_embedding_and_logits() -> None:
    torch.manual_seed(0)
    stack = make_stack([[3, 5, 8]], 40, [32], max_rank=8)
    there, prompt = stack.to(DEVICE), [(2, 1), (-1, 2), (0, 1)]
    punica = PunicaWrapperGPU(3, 64, DEVICE)
    punica.update_metadata(LoRAMapping(tuple(RUNS), tuple(prompt)))
    hidden, logits = torch.randn(4, 40), torch.randn(4, 32)
    tokens, y = torch.randint(0, 40, (ROWS,)), torch.randn(ROWS, 32)
    got_logits, got_y = logits.clone().to(DEVICE), y.clone().to(DEVICE)
    weights = (there.lora_a[0], there.lora_b[0], there.ranks, there.scales)
    punica.add_lora_logits(got_logits, hidden.to(DEVICE), *weights)
    punica.add_lora_embedding(got_y, tokens.to(DEVICE), *weights)
    one_hot = torch.nn.functional.one_hot(tokens, 40).float()
    for got, before, x, runs in ((got_logits, logits, hidden, prompt), (got_y, y, one_hot, RUNS)):
        for row, slot in enumerate(row_slots(runs)):
            expected = before[row].double() + stack.delta(x[row], slot, 35)[3:]
            torch.testing.assert_close(got[row].cpu().double(), expected, rtol=1e-5, atol=1e-5)


def linear_arguments() -> dict[str, object]:
    stack = make_stack(RANKS, 8, [7, 9], max_rank=8).to(DEVICE)
    return {
        "stack": stack,
        "x": torch.zeros(ROWS, 8, device=DEVICE),
        "y": torch.zeros(ROWS, 30, device=DEVICE),
    }


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda x: x.half(),
    "lora_a[1]": lambda a: a.contiguous(),
    "ranks": lambda ranks: ranks.T.contiguous().T,
    "scales": lambda scales: scales.repeat(1, 2)[:, ::2],
}


@pytest.mark.parametrize("argument", WRONG)
def test_shrink_names_what_its_kernel_cannot_follow(argument: str) -> None:
    given = linear_arguments()
    stack = given["stack"]
    good = {"x": given["x"], "lora_a[1]": stack.lora_a[1], "ranks": stack.ranks, "scales": stack.scales}
    bad = {**good, argument: WRONG[argument](good[argument])}
    h = unwritten_hidden(stack, ROWS).to(DEVICE)
    with pytest.raises(KernelArgumentError) as caught:
        lora_shrink.lora_shrink(
            h, bad["x"], [stack.lora_a[0], bad["lora_a[1]"]], bad["ranks"], bad["scales"], prepared(DEVICE)
        )
    assert caught.value.argument == argument


@pytest.mark.parametrize("argument", ["x", "h", "lora_a[0]", "lora_a[1]", "ranks", "scales"])
def test_shrink_names_what_is_on_another_device(argument: str) -> None:
    given, meta = linear_arguments(), prepared(DEVICE)
    stack = given["stack"]
    good = {
        "h": unwritten_hidden(stack, ROWS).to(DEVICE), "x": given["x"], "ranks": stack.ranks,
        "scales": stack.scales, "lora_a[0]": stack.lora_a[0], "lora_a[1]": stack.lora_a[1],
    }  # fmt: skip
    bad = {**good, argument: good[argument].to("meta")}
    with pytest.raises(KernelArgumentError) as caught:
        lora_shrink.lora_shrink(
            bad["h"], bad["x"], [bad["lora_a[0]"], bad["lora_a[1]"]], bad["ranks"], bad["scales"], meta
        )
    assert caught.value.argument == argument


def test_embedding_ignores_slots_out_of_range_in_the_device_buffers() -> None:
    stack = make_stack([[2, 2, 2]], 9, [7], max_rank=2).to(DEVICE)
    meta, h = prepared(DEVICE, [(0, 1), (1, 1), (2, 1)]), unwritten_hidden(stack, 3).to(DEVICE)
    meta.items[0, 0], meta.items[1, 0] = 3, -7
    tokens = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    lora_embedding.lora_embedding(h, tokens, stack.lora_a[0], stack.ranks, stack.scales, meta)
    assert (h == UNWRITTEN).all(2).tolist() == [[True, True, False]]


def test_more_slices_than_a_launch_serves_are_refused() -> None:
    stack = make_stack([[1, 1, 1]] * 4, 8, [4] * 4, max_rank=2).to(DEVICE)
    h = unwritten_hidden(stack, ROWS).to(DEVICE)
    with pytest.raises(KernelArgumentError, match=r"^lora_a holds 4 slices"):
        lora_shrink.lora_shrink(
            h, torch.zeros(ROWS, 8, device=DEVICE), stack.lora_a, stack.ranks, stack.scales, prepared(DEVICE)
        )


@pytest.mark.parametrize("rows", [26, 28])
def test_rows_must_be_the_metadatas_rows(rows: int) -> None:
    given = linear_arguments()
    stack, x = given["stack"], torch.zeros(rows, 8, device=DEVICE)
    h = unwritten_hidden(stack, rows).to(DEVICE)
    with pytest.raises(KernelArgumentError, match=r"^x has shape"):
        lora_shrink.lora_shrink(h, x, stack.lora_a, stack.ranks, stack.scales, prepared(DEVICE))
