"""The experts' methods, as vLLM's experts call them, against arithmetic pair by pair."""

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.vllm.punica_gpu import PunicaWrapperGPU
from tests.kernels.vllm.steps import MAX_LORAS, SLOTS, Config, Mapping, random_mapping, slot_of

EXPERTS, TOP_K, HIDDEN, INNER, RANK = 6, 2, 32, 24, 8
# As vLLM's layers keep it: one flag more than slots. Slot 3 is not loaded.
ENABLED = torch.tensor([1, 1, 1, 0, 0], dtype=torch.int32)


def wrapper(mapping: Mapping) -> PunicaWrapperGPU:
    punica = PunicaWrapperGPU(64, max_batches=64, device="cpu", lora_config=Config(MAX_LORAS))
    punica.update_metadata(mapping, SLOTS, MAX_LORAS + 1, 100)
    return punica


def stack(*sizes: int) -> Tensor:
    return torch.randn(MAX_LORAS, EXPERTS, *sizes).to(torch.bfloat16) / sizes[-1] ** 0.5


def delta(x: Tensor, slot: int, expert: int, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """One pair's, slices side by side, in float64; none where the slot or the expert is not here."""
    parts = [
        x.double() @ lora_a[slot, expert].double().T @ lora_b[slot, expert].double().T
        for lora_a, lora_b in zip(a, b, strict=True)
    ]
    here = slot >= 0 and ENABLED[slot] == 1 and expert >= 0
    return torch.cat(parts) * here


def routing(rows: int) -> tuple[Tensor, Tensor]:
    choices = [torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]
    ids = torch.stack(choices) if rows else torch.empty(0, TOP_K)
    return ids.to(torch.int32), torch.rand(rows, TOP_K)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("mapped", [False, True])
def test_both_products_get_their_adapters(seed: int, slices: int, mapped: bool) -> None:
    torch.manual_seed(seed)
    # Few rows take the form without sorting; many, or experts on other devices, the sorted one.
    mapping = random_mapping(seed, 3 if seed % 2 else 60)
    slots = [slot_of(adapter) for adapter in mapping.index_mapping]
    rows = len(slots)
    if rows == 0:
        return
    punica, (ids, weights) = wrapper(mapping), routing(rows)
    # This device has the odd experts alone.
    expert_map = torch.tensor([e // 2 if e % 2 else -1 for e in range(EXPERTS)], dtype=torch.int32)
    local = expert_map if mapped else torch.arange(EXPERTS)
    a13 = tuple(stack(RANK, HIDDEN) for _ in range(slices))
    b13 = tuple(stack(INNER, RANK) for _ in range(slices))
    a2, b2 = (stack(RANK, INNER),), (stack(HIDDEN, RANK),)
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    first = torch.randn(rows * TOP_K, slices * INNER).to(torch.bfloat16)
    inner = torch.randn(rows * TOP_K, INNER).to(torch.bfloat16)
    second = torch.randn(rows, TOP_K, HIDDEN).to(torch.bfloat16)
    truth_first, truth_second = first.double().clone(), second.double().clone()
    for row, slot in enumerate(slots):
        for k in range(TOP_K):
            expert, pair = int(local[ids[row, k]]), row * TOP_K + k
            truth_first[pair] += delta(x[row], slot, expert, a13, b13)
            truth_second[row, k] += weights[row, k] * delta(inner[pair], slot, expert, a2, b2)
    shared = punica.add_lora_w13(
        first, x, a13, b13, ids, weights, expert_map if mapped else None, first, first, rows, TOP_K,
        MAX_LORAS, ENABLED, EXPERTS, TOP_K, slices, False, False,
    )  # fmt: skip
    if mapped or rows == 1:
        assert (shared[0] is None) == (not mapped)
    punica.add_lora_w2(
        second, inner, a2, b2, weights, *shared, rows, first, first, TOP_K, MAX_LORAS, ENABLED, TOP_K, False,
        0, False,
    )  # fmt: skip
    torch.testing.assert_close(first.double(), truth_first, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(second.double(), truth_second, rtol=2e-2, atol=2e-2)


def test_rows_from_other_devices_bring_their_slots() -> None:
    torch.manual_seed(0)
    punica, (ids, weights) = wrapper(Mapping((5,), (5,))), routing(20)
    slots = torch.tensor([0, 1, -1, 2] * 5, dtype=torch.int32)
    a, b, x = (stack(RANK, HIDDEN),), (stack(INNER, RANK),), torch.randn(20, HIDDEN).to(torch.bfloat16)
    y = torch.zeros(20 * TOP_K, INNER, dtype=torch.bfloat16)
    *_, mapping = punica.add_lora_w13(
        y, x, a, b, ids, weights, torch.arange(EXPERTS).int(), y, y, 20, TOP_K, MAX_LORAS, ENABLED, EXPERTS,
        TOP_K, 1, False, False, token_lora_mapping=slots,
    )  # fmt: skip
    assert mapping is slots
    # The step's own slots are sorted; what has come for others' waits for a step that names them.
    touched = y.view(20, -1).ne(0).any(dim=1)
    assert touched.tolist() == (slots == 1).tolist()


def test_a_step_without_adapters_and_a_lost_alignment() -> None:
    punica, (ids, weights) = wrapper(Mapping((0,) * 4, (0,))), routing(4)
    a, b, y = (stack(RANK, HIDDEN),), (stack(HIDDEN, RANK),), torch.zeros(4, TOP_K, HIDDEN)
    rest = (4, y, y, TOP_K, MAX_LORAS, ENABLED, TOP_K, False, 0, False)
    punica.add_lora_w2(y, y, a, b, weights, None, ids.reshape(-1), None, None, *rest)
    assert not y.any()
    with pytest.raises(KernelArgumentError, match="expert_ids_lora"):
        punica.add_lora_w2(y, y, a, b, weights, None, None, None, None, *rest)


@pytest.mark.parametrize("pad", [False, True])
def test_an_alignment_has_the_references_sizes(pad: bool) -> None:
    punica = wrapper(Mapping((5,) * 9, (5,)))
    ids, _ = routing(9)
    slots, places, experts, counts = punica.moe_lora_align_block_size(
        ids, 9, 16, EXPERTS, MAX_LORAS, ENABLED, pad_sorted_ids=pad
    )
    padded = 9 * TOP_K + EXPERTS * 15
    padded += -padded % 16 if pad else 0
    assert places is not None and counts is not None
    assert (len(slots), len(places), len(experts)) == (9, MAX_LORAS * padded, MAX_LORAS * -(-padded // 16))
    mine = places.view(MAX_LORAS, -1)[1, : counts[1]]
    assert sorted(mine[mine < 9 * TOP_K].tolist()) == list(range(9 * TOP_K))
    few = punica.moe_lora_align_block_size(ids[:1], 1, 16, EXPERTS, MAX_LORAS, ENABLED)
    assert few[1] is not None
    assert len(few[1]) == MAX_LORAS * TOP_K * 16
