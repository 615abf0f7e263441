"""Alignment by vLLM's tensors: the truth against a list pair by pair, and the kernel against the truth."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.vllm.experts import align_kernel, reference
from kernels.vllm.moe_lora_align import moe_lora_align_block_size
from tests.kernels.stack import DEVICE

# What no alignment writes: a place that holds it was left alone.
UNTOUCHED = -7


@dataclass(frozen=True)
class Case:
    tokens: int
    topk: int = 2
    experts: int = 5
    block_size: int = 16
    max_loras: int = 3
    slots: tuple[int, ...] = (-1, 0, 2)
    lora_ids: tuple[int, ...] = (-1, 0, 2, -1)
    disabled: tuple[int, ...] = ()
    expert_map: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.int32
    spare: int = 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        chosen = torch.rand(self.tokens, max(self.experts, self.topk)).topk(self.topk, dim=1).indices
        mapping = torch.tensor(self.slots)[torch.randint(len(self.slots), (self.tokens + self.spare,))]
        enabled = torch.ones(self.max_loras + 1, dtype=torch.int32)
        enabled[list(self.disabled)] = 0
        to = torch.tensor(self.expert_map, dtype=torch.int32) if self.expert_map else None
        lists = torch.tensor(self.lora_ids, dtype=torch.int32)
        return chosen.to(self.dtype), mapping.to(torch.int32), enabled, lists, to

    def sizes(self) -> tuple[int, int]:
        """(places, blocks) of a slot, as vLLM makes them."""
        pairs = self.tokens * self.topk
        places = pairs + self.experts * (self.block_size - 1)
        if pairs < self.experts:
            places = pairs * self.block_size
        return places, -(-places // self.block_size)

    def run(self, form, inputs: tuple[Tensor, ...], device: str) -> list[Tensor]:
        places, blocks = self.sizes()
        sizes = (self.max_loras, places), (self.max_loras, blocks), (self.max_loras,)
        out = [torch.full(size, UNTOUCHED, dtype=torch.int32, device=device) for size in sizes]
        topk_ids, mapping, enabled, lists, to = (t if t is None else t.to(device) for t in inputs)
        form(
            topk_ids, mapping, self.experts, self.block_size, self.max_loras, places, blocks, out[0].view(-1),
            out[1].view(-1), out[2], enabled, lists, to,
        )  # fmt: skip
        return [tensor.cpu() for tensor in out]


CASES = {
    "decode": Case(4, topk=3),
    "one block a pair": Case(2, topk=1, experts=8),
    "no tokens": Case(0),
    "more places than one program counts": Case(600, topk=2, experts=7, slots=(2, 2, 0, -1)),
    "a slot is disabled": Case(9, disabled=(2,)),
    "numbers that are no slot": Case(9, slots=(0, 1), lora_ids=(7, 1, 0)),
    "a list without its tokens": Case(9, slots=(0,), lora_ids=(0, 1)),
    "experts elsewhere": Case(30, experts=6, expert_map=(1, -1, 0, -1, 2, -1)),
    "choices that are no expert": Case(12, topk=4, experts=3),
    "int64, blocks of 5": Case(21, dtype=torch.int64, block_size=5, spare=3),
    "one expert, one slot": Case(40, topk=1, experts=1, max_loras=1, slots=(0, -1), lora_ids=(-1, 0)),
}


def by_hand(case: Case, inputs: tuple[Tensor, ...]) -> list[list[tuple[int, list[int]]] | None]:
    """Of each slot its blocks (expert, pairs), or None: not sorted."""
    topk_ids, mapping, _, _, to = inputs
    slots: list[list[tuple[int, list[int]]] | None] = []
    for slot in range(case.max_loras):
        if slot not in case.lora_ids or slot in case.disabled:
            slots.append(None)
            continue
        of: dict[int, list[int]] = {}
        for pair, expert in enumerate(topk_ids.view(-1).tolist()):
            here = expert if to is None or expert >= case.experts else to[expert].item()
            if mapping[pair // case.topk] == slot and 0 <= here < case.experts and expert < case.experts:
                of.setdefault(here, []).append(pair)
        size = case.block_size
        slots.append([(e, of[e][i : i + size]) for e in sorted(of) for i in range(0, len(of[e]), size)])
    return slots


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_truth_lists_each_pair_in_its_block(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    sorted_ids, expert_ids, post_pad = case.run(reference.moe_lora_align_block_size, inputs, "cpu")
    places, blocks = case.sizes()
    for slot, wanted in enumerate(by_hand(case, inputs)):
        if wanted is None:
            assert {*sorted_ids[slot].tolist(), *expert_ids[slot].tolist(), int(post_pad[slot])} == {
                UNTOUCHED
            }
            continue
        assert post_pad[slot] == len(wanted) * case.block_size
        experts = [expert for expert, _ in wanted]
        assert expert_ids[slot].tolist() == experts + [-1] * (blocks - len(wanted))
        free = case.tokens * case.topk
        flat = [p for _, pairs in wanted for p in pairs + [free] * (case.block_size - len(pairs))]
        assert sorted_ids[slot].tolist() == flat + [free] * (places - len(flat))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_does_the_same(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    wanted = case.run(reference.moe_lora_align_block_size, inputs, "cpu")
    got = case.run(align_kernel.moe_lora_align_block_size, inputs, DEVICE)
    for name, a, b in zip(
        ("sorted_token_ids", "experts_ids", "num_tokens_post_pad"), got, wanted, strict=True
    ):
        assert torch.equal(a, b), name


def test_groups_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 32768 pairs and more need them."""
    monkeypatch.setattr(align_kernel, "_MOST_GROUPS", 2)
    test_the_kernel_does_the_same(Case(1300, experts=40, block_size=64, slots=(0, 1), lora_ids=(0,)))


def test_the_operator_takes_the_form_of_its_device_and_lives_in_a_graph() -> None:
    torch.manual_seed(0)
    case = CASES["decode"]
    inputs = case.inputs()
    wanted = case.run(reference.moe_lora_align_block_size, inputs, "cpu")
    assert all(map(torch.equal, case.run(moe_lora_align_block_size, inputs, DEVICE), wanted))
    arguments = {argument.name: argument for argument in moe_lora_align_block_size.default._schema.arguments}
    written = {name for name, argument in arguments.items() if argument.is_write}
    assert written == {"sorted_token_ids", "experts_ids", "num_tokens_post_pad"}
    compiled = torch.compile(moe_lora_align_block_size, backend="eager", fullgraph=True)
    assert all(map(torch.equal, case.run(compiled, inputs, DEVICE), wanted))


@pytest.mark.parametrize(
    "argument",
    [
        "topk_ids",
        "token_lora_mapping",
        "num_experts",
        "block_size",
        "experts_ids",
        "adapter_enabled",
        "expert_map",
    ],
)
def test_what_does_not_fit_is_named(argument: str) -> None:
    case = replace(CASES["decode"], expert_map=(0, 1, 2, 3, 4))
    topk_ids, mapping, enabled, lists, to = case.inputs()
    places, blocks = case.sizes()
    values = {
        "topk_ids": topk_ids, "token_lora_mapping": mapping, "num_experts": 5, "block_size": 16,
        "max_loras": 3,
        "max_num_tokens_padded": places, "max_num_m_blocks": blocks,
        "sorted_token_ids": torch.zeros(3 * places, dtype=torch.int32),
        "experts_ids": torch.zeros(3 * blocks, dtype=torch.int32),
        "num_tokens_post_pad": torch.zeros(3, dtype=torch.int32), "adapter_enabled": enabled,
        "lora_ids": lists, "expert_map": to,
    }  # fmt: skip
    wrong = {
        "topk_ids": topk_ids.float(), "token_lora_mapping": mapping[:2], "num_experts": 0, "block_size": 0,
        "experts_ids": torch.zeros(1, dtype=torch.int32), "adapter_enabled": enabled[:1],
        "expert_map": to.long(),
    }  # fmt: skip
    with pytest.raises(KernelArgumentError) as caught:
        moe_lora_align_block_size(**{**values, argument: wrong[argument]})
    assert caught.value.argument == argument
