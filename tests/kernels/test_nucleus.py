"""Interpreted without a GPU; on a GPU where there is one."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelArgumentError
from kernels.nucleus import nucleus
from kernels.reference.nucleus import nucleus as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def columns(rows: int, settings: list[tuple[float, float, float, float]]) -> dict[str, Tensor]:
    """Row by row (temperature, top_k, min_p, top_p), over and over."""
    temperatures, top_k, min_p, top_p = zip(*(settings[i % len(settings)] for i in range(rows)), strict=True)
    return {
        "temperatures": torch.tensor(temperatures, dtype=torch.float64),
        "top_k": torch.tensor(top_k, dtype=torch.float64).long(),
        "min_p": torch.tensor(min_p, dtype=torch.float64),
        "top_p": torch.tensor(top_p, dtype=torch.float64),
    }


def kept_of(logits: Tensor, settings: list[tuple[float, float, float, float]]) -> Tensor:
    """What the kernel keeps, which is what the reference keeps."""
    given = {"logits": logits, "best": logits.amax(-1), **columns(len(logits), settings)}
    kept = nucleus(**{name: value.to(DEVICE) for name, value in given.items()}).cpu()
    truth = reference(**given)
    assert kept.sum(-1).tolist() == truth.sum(-1).tolist()
    assert torch.equal(kept, truth)
    return kept


OFF = 1 << 40
MIX = [
    (1.0, OFF, 0.0, 0.9),
    (0.7, 40, 0.0, 1.0),
    (1.0, OFF, 0.0, 1e-9),
    (2.5, 300, 0.01, 0.95),
    (1.0, OFF, 0.2, 1.0),
    (1e30, OFF, 0.0, 0.5),
    (5e-324, OFF, 0.0, 0.999999),
    (0.1, 1, 0.5, 0.5),
    (1.0, OFF, 0.0, 0.9999999999),
    (1.0, OFF, 1.0, 0.3),
    (1.3, 5000, 1e-6, 0.7),
    (1.0, OFF, 0.0, 1.0),
]


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 2100])  # the last in three parts
def test_keeps_what_the_reference_keeps(vocab: int, rounded: bool) -> None:
    logits = torch.randn(len(MIX), vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    kept_of(logits.round() if rounded else logits, MIX)


@pytest.mark.parametrize("scale", [1e30, 1e-38])
def test_keeps_what_the_reference_keeps_of_any_values(scale: float) -> None:
    logits = torch.randn(len(MIX), 400, generator=torch.Generator().manual_seed(5)) * 4 * scale
    kept_of(logits.round() if scale > 1 else logits, MIX)


def test_values_that_lie_closer_and_closer_take_more_turns() -> None:
    logits = -(2.0 ** -torch.linspace(0, 120, 900))
    logits = logits[torch.randperm(900, generator=torch.Generator().manual_seed(2))]
    settings = [(1, 3, 0, 1), (1, 450, 0, 1), (1, 800, 0, 0.4), (1, OFF, 0, 0.7), (1e-20, OFF, 0, 0.3)]
    kept_of(logits.expand(5, -1).contiguous(), settings)


def test_a_temperature_finer_than_the_logits_loses_no_weight() -> None:
    """Where the next logits below the largest have the last weights that are not 0."""
    ulp = 2.0**-20  # of float32 at 11
    logits = 11 - ulp * torch.arange(12.0)
    settings = [(ulp * 0.25, OFF, 0, 1 - 1e-15), (ulp * 0.25, OFF, 0, 0.9999), (ulp * 3, OFF, 0.01, 0.99)]
    kept_of(logits.expand(3, -1).contiguous(), settings)


@pytest.mark.parametrize("off", ["top_k", "top_p"])
def test_a_filter_that_no_row_has_can_be_left_out(off: str) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    settings = [(1, OFF if off == "top_k" else 40, 0.001, 1 if off == "top_p" else 0.8)]
    given = {"logits": logits, "best": logits.amax(-1), **columns(4, settings)}
    there = {name: value.to(DEVICE) for name, value in given.items()}
    for keep, inputs in ((reference, given), (nucleus, there)):
        assert torch.equal(keep(**{**inputs, off: None}), keep(**inputs))


def test_of_equals_the_lowest_ids_stay_exactly() -> None:
    logits = torch.zeros(5, 10)
    logits[4, ::2] = -0.0
    settings = [(1, OFF, 0, 0.3), (1, 3, 0, 1), (1, 7, 0, 0.5), (1, OFF, 1, 0.31), (1, OFF, 0, 0.5)]
    kept = kept_of(logits, settings)
    assert kept.sum(-1).tolist() == [3, 3, 4, 4, 5]
    assert all(row.int().diff().le(0).all() for row in kept)


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]).log()
    settings = [(1, 2, 0, 0.66), (1, 2, 0, 0.67), (1, OFF, 0.2, 0.57), (1, OFF, 0.2, 0.68)]
    assert kept_of(logits.expand(4, -1).contiguous(), settings).sum(-1).tolist() == [1, 2, 1, 2]


def test_tokens_at_minus_infinity_never_stay() -> None:
    logits = torch.full((4, 300), -math.inf)
    logits[:, 40] = 3.0
    logits[1:, [7, 200]] = -90.0
    kept = kept_of(logits, [(1, OFF, 0, 1), (1, 100, 0, 1), (1, 2, 0, 1), (1, OFF, 0, 0.9)])
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [[40], [7, 40, 200], [7, 40], [40]]


def test_a_row_without_a_finite_maximum_disturbs_no_other() -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
    given = {"logits": logits, "best": logits.amax(-1), **columns(5, [(1.0, 50, 0.0, 0.8)])}
    truth = reference(**given)
    logits[0, 3], logits[2, 5], logits[4] = math.nan, math.inf, -math.inf
    given["best"] = logits.amax(-1)
    kept = nucleus(**{name: value.to(DEVICE) for name, value in given.items()}).cpu()
    assert torch.equal(kept[[1, 3]], truth[[1, 3]])
    assert torch.equal(reference(**given)[[1, 3]], truth[[1, 3]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 128_256), (64, 128_256), (300, 32_000)])
def test_a_large_vocabulary(rows: int, vocab: int, rounded: bool) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2.5
    logits = logits.round() if rounded else logits
    assert torch.equal(kept_of(logits, MIX), kept_of(logits, MIX))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_replays_with_other_logits_and_filters() -> None:
    def inputs(seed: int, settings: list[tuple[float, float, float, float]]) -> dict[str, Tensor]:
        logits = torch.randn(12, 128_256, generator=torch.Generator().manual_seed(seed)) * 3
        return {"logits": logits, "best": logits.amax(-1), **columns(12, settings)}

    held = {name: value.cuda() for name, value in inputs(0, [(1.0, OFF, 0.0, 1.0)]).items()}
    nucleus(**held)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = nucleus(**held)
    for seed in (1, 2):
        given = inputs(seed, MIX[seed:])
        for name, value in given.items():
            held[name].copy_(value)
        graph.replay()
        assert torch.equal(kept.cpu(), reference(**given))


@pytest.mark.parametrize("keep", [reference, nucleus], ids=["reference", "triton"])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logits", torch.zeros(6, 40, dtype=torch.float64)),
        ("logits", torch.zeros(40, 6).T),
        ("best", torch.zeros(7)),
        ("temperatures", torch.ones(6)),
        ("top_k", torch.ones(6, dtype=torch.int32)),
        ("min_p", torch.zeros(6)),
        ("top_p", torch.ones(6)),
    ],
)
def test_every_argument_is_checked_by_name(keep: Any, argument: str, value: Tensor) -> None:
    logits = torch.zeros(6, 40)
    given = {"logits": logits, "best": logits.amax(-1), **columns(6, MIX)} | {argument: value}
    with pytest.raises(KernelArgumentError, match=f"^{argument}"):
        keep(**{name: each.to(DEVICE) for name, each in given.items()})
