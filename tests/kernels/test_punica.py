from functools import partial

import numpy as np
import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.metadata.meta import LoRAMapping
from kernels.metadata.work_list import Run
from kernels.punica import PunicaWrapperCPU
from tests.kernels.stack import Stack, make_stack, row_slots

RANKS = [1, 2, 3, 5, 8, 12, 16, 24, 48, 64]
POPULARITY: dict[str, list[Run]] = {
    "distinct": [(slot, 1) for slot in range(10)],
    "identical": [(4, 33)],
    "skewed": [(0, 20), *((slot, 1) for slot in range(1, 10))],
    "AABA": [(0, 1), (0, 7), (1, 16), (0, 33)],
    "ABAB": [(0, 1), (1, 7), (0, 16), (1, 33)],
    "ABBA": [(9, 33), (1, 1), (1, 7), (9, 16)],
    "AAAB": [(0, 1), (0, 7), (0, 16), (1, 33)],
    "A-B-A": [(2, 16), (-1, 7), (3, 1), (-1, 1), (2, 33)],
    "base around": [(-1, 3), (7, 2), (-1, 4)],
    "no adapter": [(-1, 9)],
    "zero rows": [],
}


def wrapper(runs: list[Run], prompt: list[Run] | None = None) -> PunicaWrapperCPU:
    punica = PunicaWrapperCPU(10, 128)
    punica.update_metadata(LoRAMapping(tuple(runs), tuple(prompt or ())))
    return punica


def check_linear(punica: PunicaWrapperCPU, stack: Stack, runs: list[Run]) -> None:
    slots = row_slots(runs)
    x, y = torch.randn(len(slots), 40), torch.randn(len(slots), 70)
    before = y.clone()
    punica.add_lora_linear(y, x, stack.lora_a, stack.lora_b, stack.ranks, stack.scales, stack.column_starts)
    for row, slot in enumerate(slots):
        expected = before[row].double() + stack.delta(x[row], slot, 70)
        torch.testing.assert_close(y[row].double(), expected, rtol=1e-5, atol=1e-5)
        if slot == -1:
            assert torch.equal(y[row], before[row])


@pytest.mark.parametrize("runs", POPULARITY.values(), ids=POPULARITY.keys())
def test_linear_equals_the_row_by_row_answer_for_mixed_ranks(runs: list[Run]) -> None:
    torch.manual_seed(0)
    stack = make_stack([RANKS, RANKS[::-1], [0, 64] * 5], in_features=40, widths=[32, 8, 9], max_rank=64)
    check_linear(wrapper(runs), stack, runs)


def test_steps_follow_each_other_with_nothing_kept() -> None:
    torch.manual_seed(0)
    stack = make_stack([RANKS], in_features=40, widths=[32], max_rank=64)
    punica = PunicaWrapperCPU(10, 128)
    for runs in [[(0, 3), (1, 2)], [(-1, 2)], [], [(1, 2)], [(-1, 1), (0, 1)]]:
        punica.update_metadata(LoRAMapping(tuple(runs), ()))
        check_linear(punica, stack, runs)


def test_embedding_equals_a_one_hot_linear() -> None:
    torch.manual_seed(0)
    runs = [(3, 2), (-1, 1), (0, 4), (3, 1)]
    stack = make_stack([RANKS], in_features=40, widths=[32], max_rank=64)
    tokens, y = torch.randint(0, 40, (8,)), torch.randn(8, 32)
    before = y.clone()
    wrapper(runs).add_lora_embedding(y, tokens, stack.lora_a[0], stack.lora_b[0], stack.ranks, stack.scales)
    rows = torch.nn.functional.one_hot(tokens, 40).float()
    for row, slot in enumerate(row_slots(runs)):
        expected = before[row].double() + stack.delta(rows[row], slot, 35)[3:]
        torch.testing.assert_close(y[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_logits_use_the_rows_that_reach_the_head() -> None:
    torch.manual_seed(0)
    prompt = [(3, 1), (-1, 2), (6, 2), (3, 1)]
    stack = make_stack([RANKS], in_features=40, widths=[32], max_rank=64)
    hidden, logits = torch.randn(6, 40), torch.randn(6, 32)
    before = logits.clone()
    punica = wrapper([(3, 5), (-1, 9), (6, 2), (3, 33)], prompt)
    punica.add_lora_logits(logits, hidden, stack.lora_a[0], stack.lora_b[0], stack.ranks, stack.scales)
    for row, slot in enumerate(row_slots(prompt)):
        expected = before[row].double() + stack.delta(hidden[row], slot, 35)[3:]
        torch.testing.assert_close(logits[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 5, 7])
def test_rows_must_be_the_metadatas_rows(rows: int) -> None:
    stack = make_stack([RANKS], in_features=40, widths=[32], max_rank=64)
    punica = wrapper([(0, 6)], [(0, 6)])
    a, b, ranks, scales = stack.lora_a, stack.lora_b, stack.ranks, stack.scales
    x, y, tokens = torch.zeros(rows, 40), torch.zeros(rows, 32), torch.zeros(rows, dtype=torch.int64)
    with pytest.raises(KernelArgumentError, match=r"^x has shape .* 6 rows"):
        punica.add_lora_linear(y, x, a, b, ranks, scales, [0])
    with pytest.raises(KernelArgumentError, match=r"^x "):
        punica.add_lora_logits(y, x, a[0], b[0], ranks, scales)
    with pytest.raises(KernelArgumentError, match=r"^token_ids "):
        punica.add_lora_embedding(y, tokens, a[0], b[0], ranks, scales)


def test_rows_are_checked_in_base_only_steps_too() -> None:
    stack = make_stack([RANKS], in_features=40, widths=[32], max_rank=64)
    with pytest.raises(KernelArgumentError, match=r"^x "):
        wrapper([(-1, 6)]).add_lora_linear(
            torch.zeros(5, 32), torch.zeros(5, 40), stack.lora_a, stack.lora_b, stack.ranks, stack.scales, [0]
        )


def test_a_step_like_the_last_one_is_described_again_when_anything_changed() -> None:
    punica = PunicaWrapperCPU(3, 8)
    meta, runs = punica.token_mapping_meta, np.array([[0, 1], [2, 1]], dtype=np.int32)
    punica.update_metadata(LoRAMapping(runs, runs))
    punica.update_metadata(LoRAMapping(runs, runs))
    assert meta.token_lora_mapping.tolist()[:3] == [0, 2, -1]
    runs[1, 0] = 1  # the caller's own array, written into
    punica.update_metadata(LoRAMapping(runs, runs))
    assert meta.token_lora_mapping.tolist()[:3] == [0, 1, -1]
    meta.prepare_tensors([(2, 3)])  # past the wrapper
    punica.update_metadata(LoRAMapping(runs, runs))
    assert meta.token_lora_mapping.tolist()[:3] == [0, 1, -1]
    punica.set_slot_rank(0, 64)
    punica.update_metadata(LoRAMapping(runs, runs))
    assert meta.plan.block_rank == 64


def test_bytes_like_the_last_steps_in_another_form_are_another_step() -> None:
    punica = PunicaWrapperCPU(3, 8)
    runs = np.array([[0, 1], [2, 1]], dtype=np.int32)
    punica.update_metadata(LoRAMapping(runs, runs))
    for other in (runs.view(np.float32), runs.reshape(1, 4)):
        with pytest.raises(KernelArgumentError, match=r"^runs must be int32"):
            punica.update_metadata(LoRAMapping(other, other))
    assert punica.token_mapping_meta.token_lora_mapping.tolist()[:3] == [0, 2, -1]


def test_a_list_that_changed_since_the_last_step_is_another_step() -> None:
    """No LoRAMapping should hold one; missed, its rows would get the last step's adapters."""
    punica, runs = PunicaWrapperCPU(3, 8), [(0, 2), (1, 1)]
    for expected in ([0, 0, 1], [0, 0, 2]):
        runs[1] = (expected[-1], 1)
        punica.update_metadata(LoRAMapping(runs, ()))  # type: ignore[arg-type]
        assert punica.token_mapping_meta.token_lora_mapping.tolist()[:3] == expected


def test_rows_that_reach_the_head_are_told_from_all_rows() -> None:
    """As arrays and as pairs, in turns: a step may share the head's description, the next one may not."""
    punica = PunicaWrapperCPU(3, 8)
    for runs, head in (([(0, 1), (2, 1)], [(0, 1), (2, 1)]), ([(0, 2), (2, 3)], [(0, 1), (2, 1)])):
        for form in (tuple, partial(np.array, dtype=np.int32)):
            punica.update_metadata(LoRAMapping(form(runs), form(head)))
            for meta, wanted in ((punica.token_mapping_meta, runs), (punica.prompt_mapping_meta, head)):
                slots = row_slots(wanted)
                assert meta.token_lora_mapping.tolist() == slots + [-1] * (8 - len(slots))
