"""Turns logits into tokens: edits, penalties, filters, and noise from (seed, position, token id).

Order of operations: masks; logit_bias; forbidden tokens; repetition, presence and frequency penalties;
temperature; top_k; min_p; top_p; Gumbel-max draw. Of equal logits the lowest token id comes first.
Log-probabilities are reported from the logits as the model made them, before all of this, or behind the masks
alone for who wants them so.

All of it happens on the device, and the next step can read the drawn tokens there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.batch.sampling import (
    Outcome,
    Row,
    SampledToken,
    SampleFailure,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)
from executor.step.sampler_edits import edited
from executor.step.sampler_ops import chunks, logprobs_of, on_device
from executor.step.token_masks import WORD_BITS, Masks
from kernels.reference.gumbel_draw import gumbel_draw
from kernels.reference.nucleus import nucleus
from kernels.reference.token_masks import mask_tokens

# What stands in for a token when there is none, and why.
_FAILURES = {-1: SampleFailure.NOT_FINITE, -2: SampleFailure.NOTHING_LEFT}
_NOT_FINITE, _NOTHING = _FAILURES


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a launch drew, on its way to the host.

    tokens    int64 [n]: of every row, negative where there is none
    reports   int64 [r, 1 + 2 * count], of the rows that are reported on: logprob, top tokens, their logprobs,
              the floats by their float64 bits
    arrived   the event after which both may be read; None: they are there
    """

    rows: tuple[Row, ...]
    tokens: Tensor
    reported: tuple[int, ...]
    reports: Tensor
    arrived: torch.cuda.Event | None


class Sampler:
    """`last_tokens` int64 [max_draws] on the device: the tokens of the last launch, draw by draw (0 where
    there was nothing to draw). One tensor for ever, so that captured graphs can read it."""

    def __init__(self, max_draws: int, device: torch.device | str) -> None:
        self.last_tokens = torch.zeros(max_draws, dtype=torch.int64, device=device)
        self._ops = _Ops.on(self.last_tokens.device)

    def warm_up(self, vocab: int) -> None:
        """Draw once in every way, so that nothing is compiled or loaded later; waits for it."""
        ways: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {},
            {"top_k": 2, "top_p": 0.5, "logprobs": 1},
            {"top_p": 0.5, "logprobs": 0},
            {"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": ((0, 1.0),)},
        ]
        kinds: list[Row] = [SampleRequest(SamplingParams(**way), 1, (0,), (0,), (0,), 0) for way in ways]
        for rows in (*([kind] for kind in kinds), [kinds[0], ScoreRequest(0, 1)]):
            self.collect(self.launch(torch.zeros(len(rows), vocab, device=self.last_tokens.device), rows))
        self._warm_up_masks(vocab)

    def _warm_up_masks(self, vocab: int) -> None:
        """A mask, and one for a report, which lies elsewhere."""
        device = self.last_tokens.device
        words = torch.full((1, -(-vocab // WORD_BITS)), -1, dtype=torch.int32, device=device)
        masks = Masks((0,), torch.zeros(1, dtype=torch.int32, device=device), words)
        way = SamplingParams(temperature=0, logprobs=1, masked_logprobs=True)
        rows = [SampleRequest(way, 1, (), ())]
        self.collect(self.launch(torch.zeros(1, vocab, device=device), rows, masks))

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[Row], masks: Masks | None = None) -> Drawn:
        """logits [n, vocab] float32, unchanged; row i is for rows[i]. Waits for nothing on the device."""
        if len(logits) != len(rows):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} requests")
        tokens = self._choose_all(logits, rows, masks)
        reported = tuple(i for i, row in enumerate(rows) if row.reports is not None)
        count = min(max((rows[i].reports or 0 for i in reported), default=0), logits.shape[1])
        reports = tokens.new_empty(0, 1 + 2 * count)
        if reported:
            told = _masked_for_reports(self._ops, logits, rows, masks) if masks else logits
            reports = _report(told, tokens.clamp(min=0), reported, count)
        on_host, arrived = _to_host(torch.cat((tokens, reports.flatten())) if reported else tokens)
        return Drawn(
            tuple(rows), on_host[: len(rows)], reported, on_host[len(rows) :].view(reports.shape), arrived
        )

    def collect(self, drawn: Drawn) -> list[Outcome]:
        """One a row; waits until they are there."""
        if drawn.arrived is not None:
            drawn.arrived.synchronize()
        tokens = drawn.tokens.tolist()
        outcomes = [_outcome(token) for token in tokens]
        count = drawn.reports.shape[1] // 2
        top = drawn.reports[:, 1 : 1 + count].tolist()
        logprobs = drawn.reports.view(torch.float64).tolist()
        for i, ids, values in zip(drawn.reported, top, logprobs, strict=True):
            wanted = drawn.rows[i].reports
            best = zip(ids[:wanted], values[1 + count :][:wanted], strict=True)
            outcomes[i] = _reported(tokens[i], values[0], tuple(pair for pair in best if pair[1] > -math.inf))
        return outcomes

    def _choose_all(self, logits: Tensor, rows: Sequence[Row], masks: Masks | None) -> Tensor:
        """int64 [n]; what is drawn is in `last_tokens`, too."""
        draws = [i for i, row in enumerate(rows) if isinstance(row, SampleRequest)]
        requests = [row for row in rows if isinstance(row, SampleRequest)]
        if len(draws) == len(rows):
            tokens = self._choose(logits, requests, masks)
            torch.clamp(tokens, min=0, out=self.last_tokens[: len(draws)])
            return tokens
        given = [row.token_id if isinstance(row, ScoreRequest) else 0 for row in rows]
        tokens = on_device(given, torch.int64, logits.device)
        if draws:
            where = on_device(draws, torch.int64, logits.device)
            drawn = self._choose(logits[where], requests, masks)
            torch.clamp(drawn, min=0, out=self.last_tokens[: len(draws)])
            tokens.index_copy_(0, where, drawn)
        return tokens

    def _choose(self, logits: Tensor, requests: Sequence[SampleRequest], masks: Masks | None) -> Tensor:
        """int64 [n], with a key of _FAILURES where there is nothing to draw."""
        mask = partial(self._ops.mask, rows=masks.rows, words=masks.words) if masks else None
        changed = edited(logits, requests, self.last_tokens, mask)
        best, tokens = changed.max(-1)  # the first of equals
        drawn = [i for i, request in enumerate(requests) if request.params.temperature > 0]
        for part in chunks(len(drawn), logits.shape[1], self._ops.most_elements):
            rows = drawn[part]
            where = on_device(rows, torch.int64, logits.device)
            chosen = _drawn(self._ops, changed[where], best[where], [requests[row] for row in rows])
            tokens.index_copy_(0, where, chosen)
        # A largest logit that is finite leaves neither NaN nor +inf, and something above -inf.
        if changed is not logits:
            tokens = torch.where(_finite(best), tokens, _NOTHING)
            best = logits.amax(-1)
        return torch.where(_finite(best), tokens, _NOT_FINITE)


def _finite(values: Tensor) -> Tensor:
    return values.abs() < math.inf  # one pass less than isfinite


Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
Mask = Callable[..., None]  # logits, rows, words
Filter = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Ops:
    """What draws on a device: the filters, the draw, and how many logits of a step at once."""

    keep: Filter
    draw: Draw
    mask: Mask
    most_elements: int

    @classmethod
    def on(cls, device: torch.device) -> "_Ops":
        if device.type != "cuda":
            return cls(nucleus, gumbel_draw, mask_tokens, 1 << 22)
        from kernels.gumbel_draw import gumbel_draw as draw_on_gpu  # these need triton
        from kernels.nucleus import nucleus as keep_on_gpu
        from kernels.token_masks import mask_tokens as mask_on_gpu

        return cls(keep_on_gpu, draw_on_gpu, mask_on_gpu, 1 << 24)


def _drawn(ops: _Ops, logits: Tensor, best: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    device = logits.device
    params = [request.params for request in requests]

    def column(values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        return on_device(values, dtype, device)

    temperatures = column([each.temperature for each in params], torch.float64)
    kept = None
    if any(each.filters for each in params):
        top_k = [each.top_k or logits.shape[1] for each in params]
        top_p = [each.top_p for each in params]
        kept = ops.keep(
            logits,
            best,
            temperatures,
            column(top_k, torch.int64) if min(top_k) < logits.shape[1] else None,
            column([each.min_p for each in params], torch.float64),
            column(top_p, torch.float64) if min(top_p) < 1 else None,
        )
    # As int64 has it: the bits of an unsigned 64-bit number.
    seeds = column([each.seed - (each.seed >> 63 << 64) for each in params], torch.int64)
    positions = column([request.position for request in requests], torch.int64)
    return ops.draw(logits, best, temperatures, seeds, positions, kept)


def _masked_for_reports(ops: _Ops, logits: Tensor, rows: Sequence[Row], masks: Masks) -> Tensor:
    """With the masks of those who want log-probabilities behind them; `logits` itself where nobody does."""
    draws = [i for i, row in enumerate(rows) if isinstance(row, SampleRequest)]
    wanted = [
        (draws[draw], number)
        for number, draw in enumerate(masks.draws)
        if isinstance(row := rows[draws[draw]], SampleRequest) and row.params.masked_logprobs
    ]
    if not wanted:
        return logits
    table = on_device(wanted, torch.int32, logits.device)
    logits = logits.clone()
    ops.mask(logits, rows=table[:, 0].contiguous(), words=masks.words[table[:, 1]])
    return logits


def _report(logits: Tensor, tokens: Tensor, reported: Sequence[int], count: int) -> Tensor:
    where = on_device(reported, torch.int64, logits.device)
    parts = []
    for part in chunks(len(reported), logits.shape[1]):
        logprob, top, top_logprobs = logprobs_of(logits[where[part]], tokens[where[part]], count)
        parts.append(
            torch.cat((logprob[:, None].view(torch.int64), top, top_logprobs.view(torch.int64)), dim=1)
        )
    return torch.cat(parts)


def _to_host(data: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """One copy, into pinned memory, and the event of its end; on the CPU nothing is to do."""
    if not data.is_cuda:
        return data, None
    on_host = data.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return on_host, arrived


def _outcome(token: int) -> Outcome:
    return _FAILURES[token] if token < 0 else SampledToken(token, math.nan, ())


def _reported(token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> Outcome:
    if token < 0:
        return _FAILURES[token]
    return _FAILURES[_NOT_FINITE] if math.isnan(logprob) else SampledToken(token, logprob, top)
