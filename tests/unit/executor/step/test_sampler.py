import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor.batch.sampling import (
    Outcome,
    SampledToken,
    SampleFailure,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)
from executor.step.sampler import Sampler
from executor.step.sampler_ops import chunks
from kernels.reference.nucleus import nucleus
from tests.support.engines.row_sampler import sample_rows

VOCAB = 64


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest | ScoreRequest]) -> list[Outcome]:
    sampler = Sampler(len(requests), "cpu")
    return sampler.collect(sampler.launch(logits, requests))


def score(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[Outcome]:
    return sample(logits, [ScoreRequest(token, count) for token in tokens])


def request(
    position: int = 5,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: Sequence[int] = (),
    **params: Any,
) -> SampleRequest:
    return SampleRequest(SamplingParams(**params), position, prompt, output, forbidden)


def draw(row: torch.Tensor, one: SampleRequest) -> int:
    (result,) = sample(row[None], [one])
    assert isinstance(result, SampledToken)
    return result.token_id


def random_row(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def frequencies(row: torch.Tensor, draws: int, **params: Any) -> torch.Tensor:
    """[vocab] how often each token came, over `draws` positions of one seed."""
    requests = [request(position, **params) for position in range(draws)]
    results = sample(row.expand(draws, -1), requests)
    tokens = torch.tensor([r.token_id for r in results if isinstance(r, SampledToken)])
    return torch.bincount(tokens, minlength=len(row)).double()


def assert_drawn_from(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square; the noise is fixed, so this either always passes or never does."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    big = expected >= 5
    observed = torch.cat((counts[big], counts[~big].sum()[None]))
    wanted = torch.cat((expected[big], expected[~big].sum()[None]))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)  # about four standard deviations


def warped(row: torch.Tensor, *processors: Any, prompt: Sequence[int] = (0,)) -> torch.Tensor:
    """Probabilities by transformers."""
    scores = LogitsProcessorList(processors)(torch.tensor([list(prompt)]), row[None].clone())
    return torch.softmax(scores[0].double(), 0)


def test_draws_follow_the_distribution() -> None:
    row = random_row()
    assert_drawn_from(frequencies(row, 2000), torch.softmax(row.double(), 0))


def test_draws_over_seeds_follow_the_distribution() -> None:
    row = random_row(1)
    results = sample(
        row.expand(2000, -1), [request(seed=(seed * 2**33 + seed) % 2**64) for seed in range(2000)]
    )
    counts = torch.bincount(torch.tensor([r.token_id for r in results]), minlength=VOCAB).double()
    assert_drawn_from(counts, torch.softmax(row.double(), 0))


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 2.5}, [TemperatureLogitsWarper(2.5)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 1000}, []),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.7, "top_k": 20, "min_p": 0.05, "top_p": 0.9},
            [
                TemperatureLogitsWarper(1.7),
                TopKLogitsWarper(20),
                MinPLogitsWarper(0.05),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_filters_equal_the_warpers_of_transformers(params: dict[str, Any], processors: list[Any]) -> None:
    row = random_row(2)
    assert_drawn_from(frequencies(row, 1000, **params), warped(row, *processors))


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.2, 3), st.integers(0, 70), st.floats(0, 0.5), st.floats(0.05, 1))
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, min_p: float, top_p: float
) -> None:
    row = random_row(seed)
    settings = [torch.tensor([value], dtype=torch.float64) for value in (temperature, min_p, top_p)]
    columns = settings[0], torch.tensor([top_k or VOCAB]), *settings[1:]
    kept = nucleus(row[None], row.amax()[None], *columns)[0].nonzero()[:, 0]
    processors: list[Any] = [TemperatureLogitsWarper(temperature)]
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [MinPLogitsWarper(min_p)] if min_p else []
    processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    assert sorted(kept.tolist()) == warped(row.double(), *processors).nonzero()[:, 0].tolist()


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals() -> None:
    row = torch.zeros(VOCAB)
    row[[9, 4, 30]] = 3.0
    assert draw(row, request(temperature=0)) == 4
    assert draw(row, request(temperature=1e-300)) in {4, 9, 30}


def test_top_k_keeps_exactly_k_of_equals() -> None:
    counts = frequencies(torch.zeros(VOCAB), 400, top_k=3)
    assert counts.nonzero()[:, 0].tolist() == [0, 1, 2]


def test_repetition_penalty_equals_transformers_over_prompt_and_output() -> None:
    row = random_row(3)
    expected = warped(row, RepetitionPenaltyLogitsProcessor(1.8), prompt=[1, 2, 3, 3, 9])
    counts = frequencies(row, 1000, repetition_penalty=1.8, prompt=[1, 2, 3], output=[3, 9])
    assert_drawn_from(counts, expected)


def test_presence_and_frequency_penalties_count_output_only() -> None:
    row = torch.zeros(VOCAB)
    output = [5, 5, 5, 6]
    penalized = row.clone()
    for token, count in Counter(output).items():
        penalized[token] -= 0.5 + 0.4 * count
    counts = frequencies(row, 2000, presence_penalty=0.5, frequency_penalty=0.4, prompt=[7, 7], output=output)
    assert_drawn_from(counts, torch.softmax(penalized.double(), 0))


def test_bias_then_forbidden_then_penalty() -> None:
    row = torch.zeros(VOCAB)
    biased = request(temperature=0, logit_bias=((3, 4.0), (8, 6.0), (8, 1.0), (2, 3.5)))
    assert draw(row, biased) == 8
    assert draw(row, request(temperature=0, logit_bias=((3, 4.0), (8, 6.0)), forbidden=[8, 10**6])) == 3
    # The penalty halves the biased logit of 3, so 2 passes it.
    penalized = request(temperature=0, logit_bias=((3, 4.0), (2, 3.5)), repetition_penalty=2.0, prompt=[3])
    assert draw(row, penalized) == 2


def test_a_draw_does_not_depend_on_the_batch() -> None:
    rows = torch.stack([random_row(i) for i in range(8)])
    requests = [request(position=3 * i, seed=i, top_p=0.9 if i % 2 else 1.0, logprobs=i) for i in range(8)]
    together = sample(rows, requests)
    assert together == [sample(rows[i : i + 1], [requests[i]])[0] for i in range(8)]
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    assert [together[i] for i in order] == sample(rows[order], [requests[i] for i in order])


def test_a_filter_changes_no_draw_that_it_does_not_forbid() -> None:
    """Noise belongs to the token id, not to its place among the candidates."""
    row = random_row(4)
    for position in range(200):
        free = draw(row, request(position))
        filtered = draw(row, request(position, top_k=20))
        assert filtered == free or free not in row.topk(20).indices


def test_logprobs_are_the_models_own() -> None:
    row = random_row(5)
    expected = torch.log_softmax(row.double(), 0)
    params = {"temperature": 0.3, "logit_bias": ((1, 50.0),), "repetition_penalty": 3.0, "logprobs": 4}
    (result,) = sample(row[None], [request(prompt=[2], **params)])
    assert isinstance(result, SampledToken)
    assert result.token_id == 1
    assert result.logprob == pytest.approx(expected[1].item(), abs=1e-5)
    best = expected.topk(4)
    assert [token for token, _ in result.top] == best.indices.tolist()
    assert [logprob for _, logprob in result.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_number_of_reported_logprobs() -> None:
    row = random_row(6)
    lengths = [len(sample(row[None], [request(logprobs=n)])[0].top) for n in (None, 0, 1, 1000)]
    assert lengths == [0, 0, 1, VOCAB]


def test_score_reports_given_tokens() -> None:
    rows = torch.stack([random_row(i) for i in range(3)])
    expected = torch.log_softmax(rows.double(), -1)
    results = score(rows, [7, 8, 9], 2)
    assert [r.logprob for r in results] == pytest.approx(
        [expected[i, 7 + i].item() for i in range(3)], abs=1e-5
    )
    assert [len(r.top) for r in results] == [2, 2, 2]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}], ids=str
)
def test_a_poisoned_row_fails_alone(poison: float, params: dict[str, Any]) -> None:
    rows = torch.stack([random_row(i) for i in range(3)])
    clean = sample(rows, [request(**params)] * 3)
    rows[1, 17] = poison
    results = sample(rows, [request(**params)] * 3)
    assert isinstance(results[1], SampleFailure)
    assert [results[0], results[2]] == [clean[0], clean[2]]
    assert isinstance(score(rows, [1, 2, 3], 0)[1], SampleFailure)


def test_what_cannot_be_drawn_is_a_failure() -> None:
    row = random_row()
    forbidden, overflow, nothing = sample(
        torch.stack([row, row, torch.full_like(row, -math.inf)]),
        [
            request(forbidden=range(VOCAB)),
            request(logit_bias=((3, 3e38), (3, 3e38))),
            request(),
        ],
    )
    assert forbidden == overflow == SampleFailure.NOTHING_LEFT
    assert nothing is SampleFailure.NOT_FINITE
    with pytest.raises(ValueError, match="vocabulary of 64"):
        sample(row[None], [request(logit_bias=((VOCAB, 1.0),))])


def test_masked_logits_are_never_drawn() -> None:
    row = torch.full((VOCAB,), -math.inf)
    row[[3, 40]] = 0.0
    assert frequencies(row, 200).nonzero()[:, 0].tolist() == [3, 40]
    assert frequencies(row, 200, top_k=5, top_p=0.99).nonzero()[:, 0].tolist() == [3, 40]


def test_logits_are_left_as_they_were() -> None:
    row = random_row(7)
    before = row.clone()
    sample(
        row[None],
        [request(logit_bias=((1, 5.0),), forbidden=[2], repetition_penalty=2.0, prompt=[3], output=[4])],
    )
    assert torch.equal(row, before)


def test_extreme_temperatures_stay_finite() -> None:
    row = random_row(8, scale=50.0)
    assert draw(row, request(temperature=5e-324)) == row.argmax()
    assert frequencies(row, 300, temperature=1e30).count_nonzero() > 50


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"seed": -1},
        {"seed": 2**64},
        {"logit_bias": ((1, math.inf),)},
        {"logit_bias": ((-1, 0.0),)},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_bad_parameters_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_rows_and_requests_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sample(torch.zeros(2, VOCAB), [request()])


REQUESTS = st.builds(
    request,
    position=st.integers(0, 2**33),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    forbidden=st.lists(st.integers(0, VOCAB + 3), max_size=3),
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.sampled_from([(), (), ((3, 2.5), (9, -1.0), (3, 0.25))]),
    logprobs=st.sampled_from([None, 0, 3, 100]),
)


@settings(max_examples=150)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=6), seed=st.integers(0, 999), ties=st.booleans())
def test_a_batch_gets_what_its_rows_would_get_one_by_one(
    requests: list[SampleRequest], seed: int, ties: bool
) -> None:
    rows = torch.stack([random_row(seed + i) for i in range(len(requests))])
    if ties:
        rows = rows.round()
    if seed % 5 == 0:
        rows[0, seed % VOCAB] = (math.nan, math.inf, -math.inf)[seed % 3]
    for got, one, truth in zip(sample(rows, requests), requests, sample_rows(rows, requests), strict=True):
        if isinstance(got, SampledToken) and isinstance(truth, SampledToken):
            assert (got.token_id, got.top) == (truth.token_id, truth.top)
            assert got.logprob == truth.logprob or (one.reports is None and math.isnan(got.logprob))
        else:
            assert got == truth


def test_draws_and_scores_mix_and_the_next_launch_finds_the_draws() -> None:
    rows = torch.stack([random_row(i) for i in range(5)])
    sampler = Sampler(8, "cpu")
    mix = [ScoreRequest(4, 2), request(temperature=0), ScoreRequest(5, 0), request(seed=3, logprobs=1)]
    first = sampler.collect(sampler.launch(rows[:4], mix))
    assert [type(one) for one in first] == [SampledToken] * 4
    assert first[:1] + first[2:3] == [score(rows[:1], [4], 2)[0], score(rows[2:3], [5], 0)[0]]
    assert sampler.last_tokens[:2].tolist() == [first[1].token_id, first[3].token_id]
    assert first[1].token_id == int(rows[1].argmax())


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_pending_token_counts_as_one_of_the_output(penalty: str) -> None:
    rows = torch.stack([random_row(i) for i in range(3)])
    sampler = Sampler(3, "cpu")
    earlier = [one.token_id for one in sampler.collect(sampler.launch(rows, [request(temperature=0)] * 3))]
    drawn = torch.zeros(VOCAB)
    drawn[earlier[1]], drawn[7] = 2.0, 1.5  # the penalty decides between the two
    params = {"temperature": 0, penalty: 2.0}
    known = request(output=[9, earlier[1]], **params)
    ahead = SampleRequest(known.params, 5, (), [9], pending=1)
    assert sampler.collect(sampler.launch(drawn[None], [ahead])) == sample(drawn[None], [known])
    assert sample(drawn[None], [known])[0].token_id == 7


def test_large_batches_are_worked_on_in_parts() -> None:
    assert [(part.start, part.stop) for part in chunks(70, 1 << 17)] == [(0, 32), (32, 64), (64, 70)]
    assert list(chunks(0, 1 << 30)) == []
    assert [part.stop for part in chunks(3, 1 << 30)] == [1, 2, 3]
