"""The sampler on a GPU: the CPU's tokens, and nothing that waits for the device."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from executor.batch.sampling import (
    Outcome,
    Row,
    SampledToken,
    SampleFailure,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)
from executor.step.sampler import Sampler
from kernels.reference.philox import gumbel_noise, philox4x32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 128_256


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_integers_and_the_noise_are_those_of_the_cpu() -> None:
    counters = torch.randint(0, 1 << 32, (4, 100_000), generator=torch.Generator().manual_seed(1))
    counters[:, :16] = torch.tensor([0, (1 << 32) - 1] * 8)
    key = (0xFFFFFFFF, 0x9E3779B9)
    words = philox4x32(tuple(counters), key)
    on_gpu = philox4x32(tuple(counters.cuda()), key)
    for word, other in zip(words, on_gpu, strict=True):
        assert torch.equal(torch.as_tensor(word), torch.as_tensor(other).cpu())
    seeds = torch.tensor([[0], [-1], [1 << 62], [-(1 << 63)]])
    positions = torch.tensor([[0], [1 << 33], [77], [(1 << 32) - 1]])
    tokens = torch.arange(VOCAB)
    assert torch.equal(
        gumbel_noise(seeds, positions, tokens),
        gumbel_noise(seeds.cuda(), positions.cuda(), tokens.cuda()).cpu(),
    )


def requests(count: int) -> list[Row]:
    """Every way to draw, in a fixed mix."""
    pick = random.Random(5)
    rows: list[Row] = []
    for i in range(count):
        if i % 9 == 8:
            rows.append(ScoreRequest(pick.randrange(VOCAB), pick.choice((0, 2, 20))))
            continue
        params = SamplingParams(
            temperature=pick.choice((0.0, 0.7, 1.0, 2.0)),
            top_k=pick.choice((0, 0, 1, 40)),
            top_p=pick.choice((1.0, 1.0, 0.9)),
            min_p=pick.choice((0.0, 0.0, 0.05)),
            repetition_penalty=pick.choice((1.0, 1.0, 1.2)),
            presence_penalty=pick.choice((0.0, 0.5)),
            frequency_penalty=pick.choice((0.0, 0.2)),
            seed=pick.getrandbits(64),
            logit_bias=pick.choice(((), ((3, 30.0), (VOCAB - 1, 29.0)))),
            logprobs=pick.choice((None, None, 0, 5)),
        )
        prompt, output = ([pick.randrange(VOCAB) for _ in range(pick.randrange(9))] for _ in range(2))
        pending = i % 3 if i % 4 == 1 else -1
        rows.append(SampleRequest(params, 9 * i, prompt, output, (7,) if i % 5 == 0 else (), pending))
    return rows


def logits_for(rows: list[Row], *, ties: bool) -> torch.Tensor:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows))) * 4
    logits = logits.round() if ties else logits
    logits[4, 9] = math.nan
    logits[5, 9] = math.inf
    logits[6] = -math.inf
    return logits


def same(got: Outcome, truth: Outcome) -> None:
    if isinstance(got, SampleFailure) or isinstance(truth, SampleFailure):
        assert got == truth
        return
    assert isinstance(truth, SampledToken)
    assert (got.token_id, [t for t, _ in got.top]) == (truth.token_id, [t for t, _ in truth.top])
    assert got.logprob == pytest.approx(truth.logprob, abs=2e-5, nan_ok=True)
    assert [p for _, p in got.top] == pytest.approx([p for _, p in truth.top], abs=2e-5)


@pytest.mark.parametrize("ties", [False, True])
def test_every_way_to_draw_brings_the_cpus_tokens_without_waiting(ties: bool) -> None:
    here, there = Sampler(64, "cpu"), Sampler(64, "cuda")
    there.warm_up(VOCAB)
    first, rows = [SampleRequest(SamplingParams(temperature=0), 1, (), ())] * 3, requests(45)
    for wanted in (first, rows[:9], rows):
        logits = torch.randn(3, VOCAB) if wanted is first else logits_for(wanted, ties=ties)
        truth = here.collect(here.launch(logits, wanted))
        on_gpu = logits.cuda()
        with no_waiting():
            drawn = there.launch(on_gpu, wanted)
        assert drawn.tokens.is_pinned()
        for got, expected in zip(there.collect(drawn), truth, strict=True):
            same(got, expected)
        assert torch.equal(here.last_tokens, there.last_tokens.cpu())
