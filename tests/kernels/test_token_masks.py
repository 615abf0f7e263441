"""Interpreted without a GPU; on a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.reference.token_masks import mask_tokens as reference
from kernels.token_masks import mask_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 5


def arguments(vocab: int, rows: tuple[int, ...] = (3, 0, 4)) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=random)
    logits[0, 0], logits[3, -1] = torch.inf, torch.nan
    shape = (len(rows), -(-vocab // 32))
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=random, dtype=torch.int64).to(torch.int32)
    given = {"logits": logits, "rows": torch.tensor(rows, dtype=torch.int32), "words": words}
    return {name: value.to(DEVICE) for name, value in given.items()}


@pytest.mark.parametrize("vocab", [1, 32, 1000, 9001])
def test_bars_what_the_bits_bar_and_nothing_else(vocab: int) -> None:
    given, truth = arguments(vocab), arguments(vocab)
    before = given["logits"].cpu().clone()
    mask_tokens(**given)
    reference(**truth)
    torch.testing.assert_close(given["logits"], truth["logits"], rtol=0, atol=0, equal_nan=True)
    got, words = given["logits"].cpu(), given["words"].cpu()
    for mask, row in enumerate(given["rows"].tolist()):
        for token in range(0, vocab, 7):
            allowed = (int(words[mask, token // 32]) >> token % 32) & 1
            wanted = before[row, token].item() if allowed else float("-inf")
            assert got[row, token].item() == pytest.approx(wanted, nan_ok=True)
    others = [1, 2]
    torch.testing.assert_close(got[others], before[others], rtol=0, atol=0)


def test_no_masks_are_no_work() -> None:
    given = arguments(100, rows=())
    before = given["logits"].clone()
    mask_tokens(**given)
    torch.testing.assert_close(given["logits"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mask", [reference, mask_tokens], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logits", torch.zeros(ROWS, 100, dtype=torch.float64)),
        ("logits", torch.zeros(100, ROWS).T),
        ("rows", torch.zeros(3, dtype=torch.int64)),
        ("words", torch.zeros(2, 4, dtype=torch.int32)),
        ("words", torch.zeros(3, 3, dtype=torch.int32)),
        ("words", torch.zeros(3, 4)),
    ],
)
def test_every_argument_is_checked_by_name(mask: Any, argument: str, value: Tensor) -> None:
    with pytest.raises(KernelArgumentError, match=f"^{argument}"):
        mask(**{**arguments(100), argument: value.to(DEVICE)})
