import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.metadata.meta import LoRAKernelMeta
from kernels.reference.lora_embedding import lora_embedding
from tests.kernels.stack import UNWRITTEN, make_stack, unwritten_hidden


def test_gathers_the_tokens_column_of_own_rank() -> None:
    torch.manual_seed(0)
    stack = make_stack([[3, 0, 1]], in_features=20, widths=[5], max_rank=4)
    meta = LoRAKernelMeta.make(3, 16, "cpu")
    meta.prepare_tensors([(2, 1), (0, 2), (-1, 1), (1, 1), (2, 1)])
    tokens, h = torch.tensor([19, 0, 7, 3, 4, 19]), unwritten_hidden(stack, 6)
    lora_embedding(h, tokens, stack.lora_a[0], stack.ranks, stack.scales, meta)
    expected = torch.full((6, 4), UNWRITTEN)
    expected[:2, :3] = stack.scales[0, 0] * stack.lora_a[0][0, :3, [0, 7]].T
    expected[3:5, :1] = stack.scales[0, 2] * stack.lora_a[0][2, :1, [19, 19]].T
    torch.testing.assert_close(h[0], expected)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("token_ids", torch.zeros(2, dtype=torch.int64)),
        ("token_ids", torch.zeros(3)),
        ("lora_a", torch.zeros(3, 4, 9)),
        ("h", torch.zeros(1, 3, 5)),
        ("ranks", torch.zeros(1, 2, dtype=torch.int64)),
        ("scales", torch.zeros(2, 2)),
    ],
)
def test_every_argument_is_checked_by_name(argument: str, value: torch.Tensor) -> None:
    stack = make_stack([[2, 2]], in_features=9, widths=[5], max_rank=4)
    meta = LoRAKernelMeta.make(2, 16, "cpu")
    meta.prepare_tensors([(0, 3)])
    arguments = {
        "h": unwritten_hidden(stack, 3),
        "token_ids": torch.zeros(3, dtype=torch.int64),
        "lora_a": stack.lora_a[0],
        "ranks": stack.ranks,
        "scales": stack.scales,
    }
    lora_embedding(**arguments, meta=meta)
    with pytest.raises(KernelArgumentError, match=f"^{argument}"):
        lora_embedding(**{**arguments, argument: value}, meta=meta)
