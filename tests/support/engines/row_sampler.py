"""The sampler one row at a time, in plain steps: what the batched one must equal."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from executor.batch.sampling import SampledToken, SampleFailure, SampleRequest, SamplingParams
from kernels.reference.philox import NOISE_RANGE, gumbel_noise


def sample_rows(logits: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken | SampleFailure]:
    """logits [n, vocab] float32; log-probabilities are always reported. A row whose log-sum-exp is not finite
    holds NaN or +inf, or nothing above -inf."""
    totals = torch.logsumexp(logits, dim=-1).tolist()
    results: list[SampledToken | SampleFailure] = []
    for row, total, request in zip(logits, totals, requests, strict=True):
        token = _choose(row, request) if math.isfinite(total) else SampleFailure.NOT_FINITE
        if isinstance(token, int):
            results.append(_report(row, total, token, request.params.logprobs))
        else:
            results.append(token)
    return results


def _report(row: Tensor, total: float, token: int, count: int | None) -> SampledToken:
    best = _largest(row, count) if count else row.new_empty(0, dtype=torch.int64)
    top = zip(best.tolist(), (row[best].double() - total).tolist(), strict=True)
    return SampledToken(token, row[token].item() - total, tuple(top))


def _choose(row: Tensor, request: SampleRequest) -> int | SampleFailure:
    """`row` holds neither NaN nor +inf, and something above -inf."""
    params = request.params
    adjusted = _adjust(row, request)
    best = adjusted.max().item()
    if not math.isfinite(best):
        return SampleFailure.NOTHING_LEFT
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
