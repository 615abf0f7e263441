"""Times of top_p, top_k and min_p over a large vocabulary, beside the sort that they do without."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import Tensor

from kernels.bench.inputs import copy_rate
from kernels.bench.timing import time_calls
from kernels.nucleus import nucleus

Nucleus = Callable[..., Tensor]
VOCAB = 128_256
ROWS = (64, 8, 1, 16)
# (top_k, min_p, top_p)
FILTERS = {
    "top_p 0.9": (VOCAB, 0.0, 0.9),
    "top_k 50": (50, 0.0, 1.0),
    "top_k 50, top_p 0.95": (50, 0.0, 0.95),
    "min_p 0.05": (VOCAB, 0.05, 1.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """kept: tokens of the first row that stay; other_us: the other nucleus; sort_us: torch.sort of the logits
    alone; floor_us: the logits read once, the answer written."""

    op: str
    rows: int
    vocab: int
    logits: str
    filters: str
    kept: int
    us: float
    other_us: float | None
    sort_us: float
    floor_us: float


def run(other: Path | None) -> Iterator[dict[str, object]]:
    """other: a Python file whose nucleus() is timed on the same inputs, as one of an earlier revision."""
    before = None if other is None else _nucleus_of(other)
    for rows in ROWS:
        for name, logits in _logits(rows).items():
            for filters in FILTERS:
                yield asdict(_measure(name, logits, filters, before))


def _nucleus_of(file: Path) -> Nucleus:
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Nucleus = module.nucleus
    return found


def _logits(rows: int) -> dict[str, Tensor]:
    """Logits as a model's (deviation 2.5), sharper, flatter; many equal; all equal."""
    normal = torch.randn(rows, VOCAB, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
    return {
        "normal 2.5": normal * 2.5,
        "normal 6": normal * 6,
        "normal 1": normal,
        "rounded": (normal * 2.5).round(),
        "equal": torch.zeros_like(normal),
    }


def _measure(name: str, logits: Tensor, filters: str, other: Nucleus | None) -> Row:
    rows = len(logits)
    top_k, min_p, top_p = FILTERS[filters]
    best, ones = logits.amax(-1), torch.ones(rows, dtype=torch.float64, device="cuda")
    k, least, p = torch.full((rows,), top_k, device="cuda"), ones * min_p, ones * top_p
    given_k, given_p = k if top_k < VOCAB else None, p if top_p < 1 else None
    keep = partial(nucleus, logits, best, ones, given_k, least, given_p)
    kept = keep()
    calls = [lambda _: keep(), lambda _: logits.sort(dim=-1, descending=True).values]
    if other is not None:
        before = partial(other, logits, best, ones, k, least, p)
        if not torch.equal(before(), kept):
            raise ValueError(f"the other nucleus keeps other tokens of {rows} rows, {name}, {filters}")
        calls.append(lambda _: before())
    us, sort_us, *other_us = time_calls([(call, 4) for call in calls], rounds=9)
    floor = logits.numel() * 5 / copy_rate() * 1e6
    others = other_us[0] if other_us else None
    return Row("nucleus", rows, VOCAB, name, filters, int(kept[0].sum()), us, others, sort_us, floor)
