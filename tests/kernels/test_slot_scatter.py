"""Interpreted without a GPU; on a GPU where there is one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.launching.slot_block import UNIT, table_bytes
from kernels.reference.slot_scatter import slot_scatter as reference
from kernels.slot_scatter import slot_scatter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (at, to, length) in units: neighbours, a gap, nothing, more than one program's copies.
PIECES = [(0, 40, 3), (3, 2, 1), (4, 0, 0), (4, 50, 1100), (1104, 1, 1), (1105, 20, 13)]
RANKS, SHRINK_RANKS, SCALES = [3, 0, 7], [2, 0, 4], [0.5, 0.0, -2.25]


def block() -> Tensor:
    weights = torch.arange(UNIT * 1118, dtype=torch.int32)
    table = [*(number for piece in PIECES for number in piece), *RANKS, *SHRINK_RANKS]
    bits = np.array(SCALES, np.float32).view(np.int32)
    words = np.concatenate([weights.numpy(), np.array(table, np.int32), bits])
    return torch.from_numpy(words).view(torch.uint8).to(DEVICE)


def arguments() -> dict[str, Any]:
    return {
        "stripe": torch.full((UNIT * 1200 * 2,), -1, dtype=torch.int16, device=DEVICE),
        "ranks": torch.full((3, 4), 9, dtype=torch.int32, device=DEVICE),
        "shrink_ranks": torch.full((3, 4), 9, dtype=torch.int32, device=DEVICE),
        "scales": torch.full((3, 4), 9.0, device=DEVICE),
        "slot": 2,
        "block": block(),
    }


@pytest.mark.parametrize("scatter", [reference, slot_scatter], ids=["reference", "triton"])
def test_every_piece_and_nothing_else(scatter: Any) -> None:
    given = arguments()
    scatter(**given)
    expected = torch.full((UNIT * 1200,), -1, dtype=torch.int32)
    for at, to, length in PIECES:
        expected[to * UNIT : (to + length) * UNIT] = torch.arange(at * UNIT, (at + length) * UNIT)
    assert torch.equal(given["stripe"].view(torch.int32).cpu(), expected)
    for name, values in (("ranks", RANKS), ("shrink_ranks", SHRINK_RANKS), ("scales", SCALES)):
        assert given[name][:, 2].tolist() == values
        assert (given[name][:, [0, 1, 3]] == 9).all()


@pytest.mark.parametrize("scatter", [reference, slot_scatter], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("slot", 4),
        ("ranks", torch.zeros(3, 4)),
        ("shrink_ranks", torch.zeros(3, 5, dtype=torch.int32)),
        ("scales", torch.zeros(4, 3).T),
        ("stripe", torch.zeros(33, dtype=torch.int16)),
        ("stripe", torch.zeros(UNIT, dtype=torch.int16).expand(2, UNIT)),
        ("block", torch.zeros(table_bytes(3) - 4, dtype=torch.uint8)),
        ("block", torch.zeros(table_bytes(3) + 4, dtype=torch.uint8)),
        ("block", torch.zeros(table_bytes(3), dtype=torch.int8)),
    ],
)
def test_every_argument_is_checked_by_name(scatter: Any, argument: str, value: Any) -> None:
    value = value.to(DEVICE) if isinstance(value, Tensor) else value
    with pytest.raises(KernelArgumentError, match=f"^{argument}"):
        scatter(**{**arguments(), argument: value})
