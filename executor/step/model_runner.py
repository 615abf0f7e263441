"""The tensor side of a step: rows from a plan, the forward pass, and what is drawn from its logits."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from executor.adapters.slot_writer import SlotWriter
from executor.batch.batcher import StepPlan
from executor.batch.sampling import Outcome, Row, SampledToken, SampleFailure, SampleRequest, ScoreRequest
from executor.batch.sequence import PromptLogprob, Sequence, StopLimits
from executor.step.forward_pass import ForwardPass
from executor.step.inputs import SequenceRows
from executor.step.sampler import Drawn, Sampler
from executor.step.token_masks import Masks
from executor.step.trace import NO_TRACE, Trace


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step. Its rows of the logits: `scored` prompt tokens, then the drawn one."""

    sequence: Sequence
    rows: SequenceRows
    scored: tuple[int, ...]  # the prompt tokens whose log-probabilities are wanted
    draws: bool

    @property
    def computed(self) -> int:
        return self.rows.start + len(self.rows.token_ids)


@dataclass(frozen=True, slots=True)
class Forward:
    """A step whose draw is not launched yet. `wanted` is as of its launch: what becomes known meanwhile must
    not count twice. `logits` are valid until the next forward pass is launched."""

    shares: tuple[Share, ...]
    logits: Tensor  # float32 [wanted, vocab]
    wanted: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    shares: tuple[Share, ...]
    drawn: Drawn


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The first `computed` tokens are, now. `failure` says why the sequence cannot go on; then nothing else
    holds."""

    sequence: Sequence
    computed: int
    scores: tuple[PromptLogprob, ...] = ()
    drawn: SampledToken | None = None
    failure: SampleFailure | None = None


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
    """`others` may raise RankLost in `launch_forward`."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        sampler: Sampler,
        writer: SlotWriter,
        limits: StopLimits,
        others: OtherRanks,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._forward_pass = forward_pass
        self._sampler = sampler
        self._writer = writer
        self._limits = limits
        self._others = others
        self._trace = trace

    def launch_forward(self, plan: StepPlan) -> Forward:
        """Enqueue a step's rows behind those launched before, whose draws are launched; waits for none of
        them."""
        draws = set(plan.draws)
        shares = tuple(
            _share(sequence, count, sequence in draws) for sequence, count in plan.num_tokens.items()
        )
        rows = tuple(share.rows for share in shares)
        slots = {each.slot for each in rows if each.slot >= 0}
        self._trace.device_begins()
        self._writer.before_step(slots)
        with self._others.step(rows):
            logits = self._forward_pass.run(rows, self._sampler.last_tokens, self._trace)
        self._writer.after_step(slots)
        self._trace.lap("launch")
        return Forward(shares, logits, tuple(row for share in shares for row in self._wanted(share)))

    def launch_draw(self, forward: Forward, masks: Masks | None = None) -> Launched:
        """Enqueue the step's draw behind its rows. The i-th of its plan's `draws` draws into row i of the
        sampler's last tokens, and is number i in `masks`."""
        launched = Launched(forward.shares, self._sampler.launch(forward.logits, forward.wanted, masks))
        self._trace.lap("sample")
        return launched

    def collect(self, launched: Launched) -> list[ShareResult]:
        """Wait for the end of a step; steps are collected in the order of their launches."""
        outcomes = iter(self._sampler.collect(launched.drawn))
        return [_result(share, outcomes) for share in launched.shares]

    def close(self) -> None:
        """End the other ranks."""
        self._forward_pass.close()
        self._others.close()

    def _wanted(self, share: Share) -> Iterator[Row]:
        """One request for each of its rows of the logits."""
        sequence, dispatch = share.sequence, share.sequence.dispatch
        for token in share.scored:
            yield ScoreRequest(token, dispatch.prompt_logprobs or 0)
        if share.draws:
            counts = dispatch.sampling.penalizes
            yield SampleRequest(
                params=dispatch.sampling,
                position=sequence.length,
                prompt_token_ids=sequence.prompt_token_ids if counts else (),
                output_token_ids=sequence.output_token_ids if counts else (),
                forbidden_token_ids=tuple(sorted(self._limits.forbidden(sequence))),
                pending=share.rows.pending,
            )


def _share(sequence: Sequence, count: int, draws: bool) -> Share:
    start, end = sequence.computed, sequence.computed + count
    unknown = end - len(sequence.token_ids)
    scored: range = range(0)
    if sequence.dispatch.prompt_logprobs is not None:
        # The row at position p tells of the token at p + 1. A preempted sequence passes scored ones again.
        scored = range(
            max(start + 1, len(sequence.prompt_scores)), min(end + 1, len(sequence.dispatch.prompt_token_ids))
        )
    rows = SequenceRows(
        token_ids=[*sequence.token_ids[start:end], *([0] * unknown)],
        start=start,
        block_ids=sequence.held.block_ids,
        slot=sequence.slot,
        logit_rows=[*(position - 1 - start for position in scored), *([count - 1] if draws else [])],
        pending=sequence.pending if unknown > 0 else -1,
    )
    return Share(sequence, rows, tuple(sequence.token_ids[position] for position in scored), draws)


def _result(share: Share, outcomes: Iterator[Outcome]) -> ShareResult:
    """Takes its rows' outcomes, all of them."""
    if share.draws and not share.scored:
        outcome = next(outcomes)
        if isinstance(outcome, SampledToken):
            return ShareResult(share.sequence, share.computed, (), outcome)
        return ShareResult(share.sequence, share.computed, failure=outcome)
    mine = [next(outcomes) for _ in share.rows.logit_rows]
    tokens = [outcome for outcome in mine if isinstance(outcome, SampledToken)]
    if len(tokens) < len(mine):
        failure = next(outcome for outcome in mine if isinstance(outcome, SampleFailure))
        return ShareResult(share.sequence, share.computed, failure=failure)
    drawn = tokens.pop() if share.draws else None
    scores = tuple(PromptLogprob(token.token_id, token.logprob, token.top) for token in tokens)
    return ShareResult(share.sequence, share.computed, scores, drawn)
