"""Interpreted without a GPU; on a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.gumbel_draw import gumbel_draw
from kernels.reference.gumbel_draw import gumbel_draw as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 6


def arguments(vocab: int, filtered: bool) -> dict[str, Any]:
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=random) * 3
    logits[0, : vocab // 2] = -torch.inf
    logits[1] -= 60 * (torch.rand(vocab, generator=random) < 0.99)
    given = {
        "logits": logits,
        "best": logits.amax(-1),
        "temperatures": torch.tensor([1.0, 0.3, 5e-324, 2.5, 1e30, 1.0], dtype=torch.float64),
        "seeds": torch.tensor([0, -1, 1 << 62, 5, 5, -(1 << 63)]),
        "positions": torch.tensor([0, 7, 1 << 33, 5, 6, (1 << 32) - 1]),
        "kept": torch.rand(ROWS, vocab, generator=random) < 0.2 if filtered else None,
    }
    if filtered:
        given["kept"].scatter_(1, logits.argmax(-1, keepdim=True), True)
    return {name: value if value is None else value.to(DEVICE) for name, value in given.items()}


@pytest.mark.parametrize("filtered", [False, True], ids=["all", "filtered"])
@pytest.mark.parametrize("vocab", [1, 1000, 4096, 9001])
def test_draws_what_the_reference_draws(vocab: int, filtered: bool) -> None:
    given = arguments(vocab, filtered)
    truth = reference(**{name: value if value is None else value.cpu() for name, value in given.items()})
    assert gumbel_draw(**given).cpu().tolist() == truth.tolist()


def test_a_row_without_a_finite_maximum_disturbs_no_other() -> None:
    given = arguments(5000, False)
    truth = gumbel_draw(**given)
    given["logits"][2, 17] = torch.nan
    given["logits"][4] = -torch.inf
    given["best"] = given["logits"].amax(-1)
    drawn = gumbel_draw(**given)
    others = [0, 1, 3, 5]
    assert drawn[others].tolist() == truth[others].tolist()
    assert ((drawn >= 0) & (drawn < 5000)).all()


@pytest.mark.parametrize("draw", [reference, gumbel_draw], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logits", torch.zeros(ROWS, 40, dtype=torch.float64)),
        ("logits", torch.zeros(40, ROWS).T),
        ("best", torch.zeros(ROWS + 1)),
        ("temperatures", torch.ones(ROWS)),
        ("seeds", torch.zeros(ROWS)),
        ("positions", torch.zeros(ROWS, dtype=torch.int32)),
        ("kept", torch.zeros(ROWS, 39, dtype=torch.bool)),
    ],
)
def test_every_argument_is_checked_by_name(draw: Any, argument: str, value: Tensor) -> None:
    with pytest.raises(KernelArgumentError, match=f"^{argument}"):
        draw(**{**arguments(40, True), argument: value.to(DEVICE)})
