import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_expand import lora_expand
from tests.kernels.stack import make_stack

RUNS = [(1, 2), (-1, 1), (2, 3), (1, 1)]
SLOTS = [1, 1, -1, 2, 2, 2, 1]


def prepared() -> LoRAKernelMeta:
    meta = LoRAKernelMeta.make(3, 64, "cpu")
    meta.prepare_tensors(RUNS)
    return meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add_inputs", [True, False])
def test_changes_only_its_columns_of_adapter_rows(dtype: torch.dtype, add_inputs: bool) -> None:
    torch.manual_seed(0)
    stack = make_stack([[1, 5, 8], [3, 0, 8]], in_features=4, widths=[7, 9], max_rank=8, dtype=dtype)
    meta = prepared()
    y = torch.randn(7, 25).to(dtype)
    before, h = y.clone(), torch.full((2, 7, 8), torch.nan)
    expected = y.double()
    for place, row in enumerate(meta.token_indices_sorted_by_lora_ids.tolist()[:6]):
        for s, (start, width) in enumerate(zip(stack.column_starts, (7, 9), strict=True)):
            rank = int(stack.ranks[s, SLOTS[row]])
            h[s, place, :rank] = torch.randn(rank)
            delta = h[s, place, :rank].double() @ stack.lora_b[s][SLOTS[row], :rank].double()
            kept = expected[row, start : start + width] if add_inputs else 0
            expected[row, start : start + width] = kept + delta
    lora_expand(y, h, stack.lora_b, stack.ranks, stack.column_starts, meta, add_inputs=add_inputs)
    # One rounding to y's dtype: 2^-8 relative in bfloat16.
    torch.testing.assert_close(
        y.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    gaps = [0, 1, 2, 10, 11, 12, 22, 23, 24]
    assert torch.equal(y[2], before[2])
    assert torch.equal(y[:, gaps], before[:, gaps])


def test_every_argument_is_checked_by_name() -> None:
    stack = make_stack([[2, 2, 2]], in_features=8, widths=[4], max_rank=4)
    good = {
        "y": torch.zeros(7, 8),
        "h": torch.zeros(1, 7, 4),
        "lora_b": stack.lora_b,
        "ranks": stack.ranks,
        "column_starts": [3],
    }
    wrong = {
        "y": [torch.zeros(6, 8), torch.zeros(8, 8), torch.zeros(7, 8, dtype=torch.int32)],
        "h": [torch.zeros(1, 6, 4), torch.zeros(2, 7, 4), torch.zeros(1, 7, 4).half()],
        "lora_b": [[], [torch.zeros(2, 4, 4)], [torch.zeros(3, 4, 4).transpose(1, 2)]],
        "ranks": [stack.ranks.long(), stack.ranks[:, :2]],
        "column_starts": [[], [0, 4], [-1], [5]],
    }
    lora_expand(**good, meta=prepared())
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(KernelArgumentError, match=f"^{argument}"):
                lora_expand(**{**good, argument: value}, meta=prepared())
