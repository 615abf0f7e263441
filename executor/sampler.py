"""Logits to tokens: edits, penalties, filters, and noise from nothing but (seed, position, token id).

Order of operations: logit_bias; forbidden tokens; repetition, presence and frequency penalties; temperature;
top_k; min_p; top_p; Gumbel-max draw. Of equal logits the lowest token id comes first. Log-probabilities are
reported from the logits as the model made them, before all of this.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.philox import NOISE_RANGE, gumbel_noise


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws; the defaults draw from the plain distribution. ValueError names a bad field."""

    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0  # 64 bits, unsigned
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one

    def __post_init__(self) -> None:
        self._require("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite")
        self._require("top_k", self.top_k >= 0, "at least 0")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite")
        self._require("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        self._require("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        self._require("seed", 0 <= self.seed < 2**64, "an unsigned 64-bit number")
        biases_fit = all(token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias)
        self._require("logit_bias", biases_fit, "pairs of a token id and a finite number")
        self._require("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0")

    def _require(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{field} must be {wanted}, not {getattr(self, field)!r}")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    params: SamplingParams
    position: int  # of the token that is drawn: len(prompt) + len(output)
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    forbidden_token_ids: Sequence[int] = ()  # EOS and stop ids while min_new_tokens is not reached


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float  # of the model's own distribution: before biases, penalties and temperature
    top: tuple[tuple[int, float], ...]  # the `logprobs` likeliest (token, log-probability), best first


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """Nothing can be drawn for this sequence; its neighbours in the step are fine."""

    reason: str


# A row of logits whose log-sum-exp is not finite holds NaN or +inf, or nothing above -inf.
_NOT_FINITE = SampleFailure("the model's logits are not finite")


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken | SampleFailure]:
    """logits [n, vocab] float32, unchanged; row i is for requests[i], and so is result i."""
    if len(logits) != len(requests):
        raise ValueError(f"{len(logits)} rows of logits for {len(requests)} requests")
    totals = torch.logsumexp(logits, dim=-1).tolist()
    results: list[SampledToken | SampleFailure] = []
    for row, total, request in zip(logits, totals, requests, strict=True):
        token = _choose(row, request) if math.isfinite(total) else _NOT_FINITE
        if isinstance(token, int):
            results.append(_report(row, total, token, request.params.logprobs))
        else:
            results.append(token)
    return results


def score(
    logits: Tensor, token_ids: Sequence[int], logprobs: int | None
) -> list[SampledToken | SampleFailure]:
    """What `sample` would report had it drawn token_ids[i] from row i: for the tokens of a prompt."""
    if len(logits) != len(token_ids):
        raise ValueError(f"{len(logits)} rows of logits for {len(token_ids)} tokens")
    totals = torch.logsumexp(logits, dim=-1).tolist()
    return [
        _report(row, total, token, logprobs) if math.isfinite(total) else _NOT_FINITE
        for row, total, token in zip(logits, totals, token_ids, strict=True)
    ]


def _report(row: Tensor, total: float, token: int, count: int | None) -> SampledToken:
    best = _largest(row, count) if count else row.new_empty(0, dtype=torch.int64)
    top = zip(best.tolist(), (row[best].double() - total).tolist(), strict=True)
    return SampledToken(token, row[token].item() - total, tuple(top))


def _choose(row: Tensor, request: SampleRequest) -> int | SampleFailure:
    """`row` holds neither NaN nor +inf, and something above -inf."""
    params = request.params
    if outside := [token for token, _ in params.logit_bias if token >= len(row)]:
        return SampleFailure(f"logit_bias names token {outside[0]}, but the vocabulary has {len(row)}")
    adjusted = _adjust(row, request)
    best = adjusted.max().item()
    if not math.isfinite(best):
        return SampleFailure("biases, penalties and forbidden tokens leave nothing to draw")
    if params.temperature == 0:
        return int(adjusted.argmax())
    # In float64 and below zero a tiny temperature only sinks the others: it never overflows into ties.
    scaled = (adjusted.double() - best) / params.temperature
    kept = eligible_tokens(scaled, params)
    kept = kept[scaled[kept] > -NOISE_RANGE]  # the others cannot win, whatever their noise
    return int(kept[(scaled[kept] + gumbel_noise(params.seed, request.position, kept)).argmax()])


def _adjust(row: Tensor, request: SampleRequest) -> Tensor:
    """Biases, forbidden tokens and penalties, in this order; returns `row` itself when there are none."""
    params, output = request.params, request.output_token_ids
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        row = row.index_add(0, _ids(tokens, row), row.new_tensor(biases))
    if request.forbidden_token_ids:
        row = row.index_fill(
            0, _ids([t for t in request.forbidden_token_ids if t < len(row)], row), -math.inf
        )
    if params.repetition_penalty != 1:
        seen = _ids({*request.prompt_token_ids, *output}, row)
        penalty = params.repetition_penalty
        row = row.index_copy(0, seen, torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty))
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        drop = params.presence_penalty + params.frequency_penalty * row.new_tensor(list(counts.values()))
        row = row.index_add(0, _ids(counts, row), -drop)
    return row


def eligible_tokens(scaled: Tensor, params: SamplingParams) -> Tensor:
    """The token ids that top_k, min_p and top_p leave. `scaled` is [vocab] float64: logits over temperature,
    shifted so that the largest is 0."""
    kept = _largest(scaled, params.top_k) if params.top_k else (scaled > -math.inf).nonzero()[:, 0]
    if params.min_p > 0:
        kept = kept[scaled[kept] >= math.log(params.min_p)]
    return _nucleus(scaled, kept, params.top_p) if params.top_p < 1 else kept


def _nucleus(scaled: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """The fewest likeliest of `kept` whose probabilities, among `kept`, reach top_p."""
    probabilities = torch.softmax(scaled[kept], dim=0)
    # All tokens under (1 - top_p) / n weigh less than 1 - top_p together, so none is needed to reach top_p;
    # sorting the others is far cheaper.
    heavy = probabilities >= (1 - top_p) / len(kept)
    kept, probabilities = kept[heavy], probabilities[heavy]
    probabilities, order = probabilities.sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities
    return kept[order[before < top_p]]


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest above -inf (or fewer), best first, of equals the lowest index first."""
    threshold = values.topk(min(count, len(values))).values[-1]
    candidates = ((values >= threshold) & (values > -math.inf)).nonzero()[:, 0]
    return candidates[values[candidates].sort(descending=True, stable=True).indices[:count]]


def _ids(tokens: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)
