"""top_p, top_k and min_p over a large vocabulary, beside the sort that they do without."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.bench.inputs import copy_rate
from kernels.bench.timing import time_calls
from kernels.nucleus import nucleus

VOCAB = 128_256
ROWS = (1, 8, 64)
# (top_k, min_p, top_p)
FILTERS = {
    "top_p 0.9": (VOCAB, 0.0, 0.9),
    "top_k 50": (50, 0.0, 1.0),
    "top_k 50, top_p 0.95": (50, 0.0, 0.95),
    "min_p 0.05": (VOCAB, 0.05, 1.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """kept: tokens of the first row that stay; sort_us: torch.sort of the logits alone; floor_us: the logits
    read once, the answer written."""

    op: str
    rows: int
    vocab: int
    logits: str
    filters: str
    kept: int
    us: float
    sort_us: float
    floor_us: float


def run() -> Iterator[dict[str, object]]:
    for rows in ROWS:
        for name, logits in _logits(rows).items():
            for filters in FILTERS:
                yield asdict(_measure(name, logits, filters))


def _logits(rows: int) -> dict[str, Tensor]:
    """As a model's (deviation 2.5), sharper, flatter; many equal; all equal."""
    normal = torch.randn(rows, VOCAB, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
    return {
        "normal 2.5": normal * 2.5,
        "normal 6": normal * 6,
        "normal 1": normal,
        "rounded": (normal * 2.5).round(),
        "equal": torch.zeros_like(normal),
    }


def _measure(name: str, logits: Tensor, filters: str) -> Row:
    rows = len(logits)
    top_k, min_p, top_p = FILTERS[filters]
    columns = (
        logits.amax(-1),
        torch.ones(rows, dtype=torch.float64, device="cuda"),
        torch.full((rows,), top_k, device="cuda"),
        torch.full((rows,), min_p, dtype=torch.float64, device="cuda"),
        torch.full((rows,), top_p, dtype=torch.float64, device="cuda"),
    )
    kept = int(nucleus(logits, *columns)[0].sum())
    calls = [partial(_filter, logits, columns), partial(_sort, logits)]
    us, sort_us = time_calls([(call, 4) for call in calls], rounds=9)
    floor = logits.numel() * 5 / copy_rate() * 1e6
    return Row("nucleus", rows, VOCAB, name, filters, kept, us, sort_us, floor)


def _filter(logits: Tensor, columns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], index: int) -> Tensor:
    return nucleus(logits, *columns)


def _sort(logits: Tensor, index: int) -> Tensor:
    return logits.sort(dim=-1, descending=True).values
