"""The tensor side of a step: rows from a plan, the forward pass, and what is drawn from its logits."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor.attention import KVCache
from executor.forward import ForwardContext, SequenceRows, build_step
from executor.models import CausalLM
from executor.sampler import SampledToken, SampleFailure, SampleRequest, sample, score
from executor.sequence import PromptLogprob, Sequence, StopLimits
from kernels.punica import PunicaWrapperBase


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step. Its rows of the logits: `scored` prompt tokens, then the drawn one."""

    sequence: Sequence
    rows: SequenceRows
    scored: tuple[int, ...]  # the prompt tokens whose log-probabilities are wanted
    draws: bool  # whether all known tokens are computed after this step, so that a new one is due


@dataclass(frozen=True, slots=True)
class BuiltStep:
    shares: tuple[Share, ...]
    token_ids: Tensor  # [rows] int64
    context: ForwardContext


@dataclass(frozen=True, slots=True)
class ShareResult:
    """`failure` says why the sequence cannot go on; then nothing else holds."""

    sequence: Sequence
    num_tokens: int
    scores: tuple[PromptLogprob, ...] = ()
    drawn: SampledToken | None = None
    failure: str | None = None


class OtherRanks(Protocol):
    """They run every step that this rank runs: `step` tells them its sequences, and spans ours."""

    def step(self, sequences: tuple[SequenceRows, ...]) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


class NoOtherRanks:
    def step(self, sequences: tuple[SequenceRows, ...]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class ModelRunner:
    """`others` may raise RankLost in `forward`."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        punica: PunicaWrapperBase,
        limits: StopLimits,
        others: OtherRanks,
    ) -> None:
        self._others = others
        self._model = model
        self._kv_cache = kv_cache
        self._punica = punica
        self._limits = limits

    def build(self, num_tokens: Mapping[Sequence, int]) -> BuiltStep:
        """The step's tensors; valid until the next call."""
        shares = tuple(_share(sequence, count) for sequence, count in num_tokens.items())
        token_ids, context = build_step([share.rows for share in shares], self._kv_cache, self._punica)
        return BuiltStep(shares, token_ids, context)

    @torch.inference_mode()
    def forward(self, step: BuiltStep) -> Tensor:
        """Logits [wanted rows, vocab] float32, in the order of the shares; the rows' KV is in the cache."""
        with self._others.step(step.context.sequences):
            hidden = self._model(step.token_ids, step.context)
            return self._model.compute_logits(hidden, step.context)

    def close(self) -> None:
        """End the other ranks."""
        self._others.close()

    @torch.inference_mode()
    def sample(self, step: BuiltStep, logits: Tensor) -> list[ShareResult]:
        draw_rows, score_rows = _split_rows(step.shares)
        drawn = iter(sample(logits[draw_rows], [self._request(s.sequence) for s in step.shares if s.draws]))
        results = []
        for share, rows in zip(step.shares, score_rows, strict=True):
            scores = (
                score(logits[rows], share.scored, share.sequence.dispatch.prompt_logprobs) if rows else []
            )
            results.append(_result(share, scores, next(drawn) if share.draws else None))
        return results

    def _request(self, sequence: Sequence) -> SampleRequest:
        return SampleRequest(
            params=sequence.dispatch.sampling,
            position=len(sequence.token_ids),
            prompt_token_ids=sequence.dispatch.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            forbidden_token_ids=tuple(sorted(self._limits.forbidden(sequence))),
        )


def _share(sequence: Sequence, count: int) -> Share:
    start, end = sequence.computed, sequence.computed + count
    draws = end == len(sequence.token_ids)
    scored: range = range(0)
    if sequence.dispatch.prompt_logprobs is not None:
        # The row at position p tells of the token at p + 1. A preempted sequence passes scored ones again.
        scored = range(
            max(start + 1, len(sequence.prompt_scores)), min(end + 1, len(sequence.dispatch.prompt_token_ids))
        )
    rows = SequenceRows(
        token_ids=sequence.token_ids[start:end],
        start=start,
        block_ids=sequence.held.block_ids,
        slot=sequence.slot,
        logit_rows=[*(position - 1 - start for position in scored), *([count - 1] if draws else [])],
    )
    return Share(sequence, rows, tuple(sequence.token_ids[position] for position in scored), draws)


def _split_rows(shares: Iterable[Share]) -> tuple[list[int], list[list[int]]]:
    """Rows of the logits: the drawn ones, and each share's scored ones."""
    draw_rows, score_rows, row = [], [], 0
    for share in shares:
        score_rows.append(list(range(row, row + len(share.scored))))
        row += len(share.scored)
        if share.draws:
            draw_rows.append(row)
            row += 1
    return draw_rows, score_rows


def _result(
    share: Share,
    scores: Iterable[SampledToken | SampleFailure],
    drawn: SampledToken | SampleFailure | None,
) -> ShareResult:
    count = len(share.rows.token_ids)
    prompt_scores = []
    for outcome in scores:
        if isinstance(outcome, SampleFailure):
            return ShareResult(share.sequence, count, failure=outcome.reason)
        prompt_scores.append(PromptLogprob(outcome.token_id, outcome.logprob, outcome.top))
    if isinstance(drawn, SampleFailure):
        return ShareResult(share.sequence, count, failure=drawn.reason)
    return ShareResult(share.sequence, count, tuple(prompt_scores), drawn)
