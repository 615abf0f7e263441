"""Blocks of one expert and one adapter, from the step's choices."""

import pytest
import torch
from torch import Tensor

from kernels import moe_lora_align as triton_align
from kernels.errors import KernelArgumentError
from kernels.launching.moe_blocks import MoEBlocks
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run
from kernels.reference import moe_lora_align as reference_align
from tests.kernels.moe_stack import random_choices
from tests.kernels.stack import DEVICE, row_slots

FORMS = {"reference": (reference_align, "cpu"), "triton": (triton_align, DEVICE)}

STEPS: dict[str, list[Run]] = {
    "mixed": [(2, 5), (-1, 2), (0, 9), (2, 1), (3, 1)],
    "one adapter": [(1, 18)],
    "all slots, base rows too": [(-1, 3), *((slot, 3) for slot in range(4)), (-1, 3)],
    "base only": [(-1, 18)],
    "no rows": [],
}


def prepared(runs: list[Run], device: str = "cpu") -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(4, 32, device)
    meta.prepare_tensors(runs)
    return meta


def named(blocks: MoEBlocks) -> list[tuple[int, int, list[int]]]:
    """(slot, expert, pairs) of every block, in the table's order."""
    ids = blocks.sorted_ids.tolist()
    return [(s, e, ids[first : first + n]) for s, e, first, n in blocks.blocks.tolist() if s >= 0]


def check_blocks(blocks: MoEBlocks, slots: list[int], experts: Tensor, block_size: int) -> None:
    """Every pair with a slot and an expert is in one block of its group, in order; only the last is short."""
    topk, found = experts.shape[1], list[tuple[int, int, int]]()
    for slot, expert, pairs in named(blocks):
        assert 0 < len(pairs) <= block_size
        found += [(slot, expert, pair) for pair in pairs]
    expected = [
        (slots[p // topk], int(e), p) for p, e in enumerate(experts.flatten()) if slots[p // topk] >= 0 <= e
    ]
    assert found == sorted(expected)
    for before, after in zip(named(blocks), named(blocks)[1:], strict=False):
        assert before[:2] != after[:2] or len(before[2]) == block_size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pad", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("block_size", [1, 4, 64])
@pytest.mark.parametrize("runs", STEPS.values(), ids=STEPS)
def test_every_pair_is_in_one_block_of_its_slot_and_expert(
    runs: list[Run], block_size: int, pad: bool, form: str
) -> None:
    torch.manual_seed(0)
    slots, (op, device) = row_slots(runs), FORMS[form]
    topk_ids, meta = random_choices(len(slots), 3, 5), prepared(runs, device)
    blocks = op.moe_lora_align_block_size(topk_ids.to(device), 5, block_size, meta, pad_sorted_ids=pad)
    check_blocks(blocks, slots, topk_ids, block_size)
    if pad:
        assert all(first % block_size == 0 for slot, _, first, _ in blocks.blocks.tolist() if slot >= 0)
        used = sum(len(pairs) for *_, pairs in named(blocks))
        assert (blocks.sorted_ids == topk_ids.numel()).sum() == len(blocks.sorted_ids) - used


@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_experts_that_are_elsewhere_or_nowhere_are_in_no_block(form: str) -> None:
    torch.manual_seed(0)
    op, device = FORMS[form]
    runs = STEPS["mixed"]
    topk_ids = random_choices(18, 2, 6)
    topk_ids[3, 0], topk_ids[4, 1] = -1, 99
    expert_map = torch.tensor([-1, 1, -1, 0, 2, -1], dtype=torch.int32)
    here = torch.tensor([[-1 if not 0 <= e < 6 else int(expert_map[e]) for e in row] for row in topk_ids])
    blocks = op.moe_lora_align_block_size(
        topk_ids.to(device), 3, 4, prepared(runs, device), expert_map=expert_map.to(device)
    )
    check_blocks(blocks, row_slots(runs), here, 4)


@pytest.mark.parametrize("form", FORMS)
def test_the_base_models_blocks_hold_all_rows(form: str) -> None:
    torch.manual_seed(0)
    op, device = FORMS[form]
    topk_ids = random_choices(9, 2, 4)
    check_blocks(op.moe_align_block_size(topk_ids.to(device), 4, 4), [0] * 9, topk_ids, 4)


# Step and number of experts.
MANY: dict[str, tuple[list[Run], int]] = {
    "one launch": ([(1, 100), (-1, 7), (3, 150)], 1000),
    "one slot, several groups": ([(2, 600)], 40),
    "groups that end with slots": ([(0, 257), (-1, 1), (1, 256), (2, 1)], 1000),
}


@pytest.mark.parametrize(("runs", "experts"), MANY.values(), ids=MANY)
def test_many_chunks_of_pairs(runs: list[Run], experts: int) -> None:
    """More than 1024 pairs are counted in groups of 512 by a launch before, and placed 64 at a time."""
    torch.manual_seed(0)
    slots = row_slots(runs)
    topk_ids = random_choices(len(slots), 2, 40) * (experts // 40)
    meta = LoRAKernelMeta.make(4, len(slots), DEVICE)
    meta.prepare_tensors(runs)
    blocks = triton_align.moe_lora_align_block_size(topk_ids.to(DEVICE), experts, 16, meta)
    check_blocks(blocks, slots, topk_ids, 16)


@pytest.mark.parametrize("slots", [(3, 500), range(0, 512, 7)], ids=["few", "many"])
def test_the_list_is_as_long_as_the_plan_has_room_for(slots: tuple[int, ...]) -> None:
    """Of 512 slots a step on few has a list of 64."""
    torch.manual_seed(0)
    runs = [(slot, 1) for slot in slots]
    topk_ids, meta = random_choices(len(runs), 2, 4), LoRAKernelMeta.make(512, 256, DEVICE)
    meta.prepare_tensors(runs)
    blocks = triton_align.moe_lora_align_block_size(topk_ids.to(DEVICE), 4, 4, meta)
    check_blocks(blocks, row_slots(runs), topk_ids, 4)
    assert triton_align.listed_slots(triton_align.num_slots(meta), 512) == (64 if len(runs) < 64 else 128)


@pytest.mark.parametrize(
    ("argument", "topk_ids"),
    [("topk_ids", torch.zeros(17, 2, dtype=torch.int32)), ("topk_ids", torch.zeros(18, 2))],
)
def test_choices_must_be_the_steps(argument: str, topk_ids: Tensor) -> None:
    with pytest.raises(KernelArgumentError) as caught:
        triton_align.moe_lora_align_block_size(topk_ids.to(DEVICE), 4, 4, prepared(STEPS["mixed"], DEVICE))
    assert caught.value.argument == argument
