import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run
from kernels.reference.lora_shrink import lora_shrink
from tests.kernels.stack import UNWRITTEN, make_stack, unwritten_hidden


def prepared(runs: list[Run], slots: int) -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(slots, 64, "cpu")
    meta.prepare_tensors(runs)
    return meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_scaled_products_at_own_rank_and_nothing_else(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = make_stack([[1, 5, 8], [3, 0, 8]], in_features=33, widths=[7, 9], max_rank=8, dtype=dtype)
    runs = [(1, 2), (-1, 1), (2, 3), (1, 1)]
    meta = prepared(runs, slots=3)
    x = torch.randn(7, 33).to(dtype)
    h = unwritten_hidden(stack, 7)
    lora_shrink(h, x, stack.lora_a, stack.ranks, stack.scales, meta)
    order = meta.token_indices_sorted_by_lora_ids.tolist()
    for s in range(2):
        for place in range(7):
            slot = int(meta.token_lora_mapping[order[place]])
            rank = int(stack.ranks[s, slot]) if slot >= 0 else 0
            expected = stack.scales[s, slot] * (
                stack.lora_a[s][slot, :rank].double() @ x[order[place]].double()
            )
            torch.testing.assert_close(h[s, place, :rank].double(), expected, rtol=1e-5, atol=1e-5)
            assert (h[s, place, rank:] == UNWRITTEN).all()


def test_repeated_runs_are_bit_identical() -> None:
    torch.manual_seed(0)
    stack = make_stack([[4, 7]], in_features=50, widths=[6], max_rank=8)
    meta, x = prepared([(0, 5), (1, 4), (0, 2)], slots=2), torch.randn(11, 50)
    first, second = torch.zeros(1, 11, 8), torch.zeros(1, 11, 8)
    lora_shrink(first, x, stack.lora_a, stack.ranks, stack.scales, meta)
    lora_shrink(second, x, stack.lora_a, stack.ranks, stack.scales, meta)
    assert torch.equal(first, second)


def test_every_argument_is_checked_by_name() -> None:
    stack = make_stack([[2, 2]], in_features=8, widths=[4], max_rank=4)
    meta = prepared([(0, 3)], slots=2)
    good = {
        "h": unwritten_hidden(stack, 3),
        "x": torch.zeros(3, 8),
        "lora_a": stack.lora_a,
        "ranks": stack.ranks,
        "scales": stack.scales,
    }
    wrong = {
        "h": [torch.zeros(1, 3, 5), torch.zeros(1, 3, 4, dtype=torch.bfloat16)],
        "x": [torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(3, 8, dtype=torch.int64)],
        "lora_a": [
            [],
            [torch.zeros(3, 4, 8)],
            [torch.zeros(2, 4, 9)],
            [torch.zeros(2, 8, 4).transpose(1, 2)],
        ],
        "ranks": [stack.ranks.long(), stack.ranks[:, :1]],
        "scales": [stack.scales.double(), stack.scales.T],
    }
    lora_shrink(**good, meta=meta)
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(KernelArgumentError, match=f"^{argument}") as caught:
                lora_shrink(**{**good, argument: value}, meta=meta)
            assert caught.value.argument.startswith(argument)
