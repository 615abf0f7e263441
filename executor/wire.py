"""Turns the wire's messages into the engine's dataclasses, and back. Nothing is decided here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from executor.adapters.cold_waits import ColdWait
from executor.adapters.residency import Copy, Residency, ResidencyDelta, Tier
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, FinishReason, PromptLogprob, StopRules
from executor.errors import InvalidDispatch
from executor.events import EngineInfo, Finished, NewToken, Rejected, Status
from lorafleet.constraints.constraint import Constraint
from lorafleet.v1 import adapters_pb2, common_pb2, executor_pb2

PROTOCOL_VERSION = 1
# Half of what a message may have. Schedulers bound what one dispatch's prompt takes to less.
MAX_STEP_BYTES = 8 << 20

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: common_pb2.FINISH_REASON_TIME_LIMIT,
}
_TIERS = {
    Tier.DISK: adapters_pb2.RESIDENCY_TIER_DISK,
    Tier.HOST: adapters_pb2.RESIDENCY_TIER_HOST,
    Tier.SLOT: adapters_pb2.RESIDENCY_TIER_SLOT,
}


def dispatch_from(message: executor_pb2.Dispatch, stream: int, now: float) -> Dispatch:
    """Raises InvalidDispatch, naming the field that is out of range."""
    if not message.dispatch_id:
        raise InvalidDispatch("dispatch_id is empty")
    try:
        sampling = _sampling(message)
    except ValueError as error:
        raise InvalidDispatch(f"sampling: {error}") from error
    stopping = message.stopping
    return Dispatch(
        key=(stream, message.dispatch_id),
        request_id=message.request_id,
        digest=message.digest,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=sampling,
        stop=StopRules(
            max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
            min_new_tokens=stopping.min_new_tokens,
            stop_token_ids=frozenset(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
        ),
        cache_salt=message.cache_salt,
        deadline=now + message.time_left_ms / 1000 if message.time_left_ms else None,
        accepted_at=now - message.waited_ms / 1000,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        constraint=_constraint(message),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=_bad_words(message),
    )


def _constraint(message: executor_pb2.Dispatch) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    constraint = Constraint.from_proto(message.constraint)
    if constraint is None:
        raise InvalidDispatch("constraint has no kind that is known here")
    return constraint


def _bad_words(message: executor_pb2.Dispatch) -> tuple[tuple[int, ...], ...]:
    if not all(word.token_ids for word in message.bad_words):
        raise InvalidDispatch("bad_words has one of no tokens")
    return tuple(tuple(word.token_ids) for word in message.bad_words)


def _sampling(message: executor_pb2.Dispatch) -> SamplingParams:
    sampling = message.sampling
    if not sampling.HasField("seed") and sampling.temperature > 0:
        raise InvalidDispatch("sampling.seed is not set")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        masked_logprobs=message.masked_logprobs,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def tier_from(tier: adapters_pb2.ResidencyTier) -> Tier:
    """SLOT for SLOT, HOST for all others: the disk tier is behind the host one."""
    return Tier.SLOT if tier == adapters_pb2.RESIDENCY_TIER_SLOT else Tier.HOST


def hello(info: EngineInfo, instance_id: str, residency: Residency) -> executor_pb2.Hello:
    return executor_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        instance_id=instance_id,
        model_fingerprint=info.model_fingerprint,
        max_model_len=info.max_model_len,
        max_rank=info.max_rank,
        modules=info.modules,
        max_loras=info.max_loras,
        max_full_heads=info.max_full_heads,
        max_seats=info.max_seats,
        num_kv_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        residency=map(_entry, residency.copies),
        residency_number=residency.number,
        tells_drops=True,
        knows_waits=True,
        knows_constraints=info.knows_constraints,
    )


def step_events(
    step: int, tokens: Sequence[NewToken], ends: Sequence[Finished] = ()
) -> Iterator[executor_pb2.ExecutorEvent]:
    """The tokens of one step for one stream, one for each dispatch in it, and who ended: in one event, unless
    many prompts with log-probabilities end in the step and would make it too large."""
    logprobs: list[executor_pb2.DispatchLogprobs] = []
    start, num_bytes = 0, 0
    for index, token in enumerate(tokens):
        if not (token.wants_logprobs or token.prompt_scores):
            continue
        entry = _logprobs(token)
        size = entry.ByteSize()
        if num_bytes and num_bytes + size > MAX_STEP_BYTES:
            yield _step_event(step, tokens[start:index], logprobs)
            start, num_bytes, logprobs = index, 0, []
        num_bytes += size
        logprobs.append(entry)
    last = _step_event(step, tokens[start:], logprobs)
    last.step.finished.extend(map(_finished, ends))
    yield last


def _step_event(
    step: int, tokens: Sequence[NewToken], logprobs: Iterable[executor_pb2.DispatchLogprobs]
) -> executor_pb2.ExecutorEvent:
    """From lists, each in one go: token by token it took four times as long, in every step."""
    return executor_pb2.ExecutorEvent(
        step=executor_pb2.StepTokens(
            step=step,
            dispatch_ids=[token.key[1] for token in tokens],
            first_output_index=[token.output_index for token in tokens],
            token_counts=[1] * len(tokens),
            token_ids=[token.token.token_id for token in tokens],
            logprobs=logprobs,
        )
    )


def finished_event(end: Finished) -> executor_pb2.ExecutorEvent:
    return executor_pb2.ExecutorEvent(finished=_finished(end))


def _finished(end: Finished) -> executor_pb2.Finished:
    return executor_pb2.Finished(
        dispatch_id=end.key[1],
        reason=_REASONS[end.reason],
        cached_prompt_tokens=end.cached_prompt_tokens,
    )


def rejected_event(refused: Rejected) -> executor_pb2.ExecutorEvent:
    rejection = refused.rejection
    return executor_pb2.ExecutorEvent(
        rejected=executor_pb2.Rejected(
            dispatch_id=refused.key[1],
            message=rejection.message,
            reason=rejection.reason,
            retryable=rejection.retryable,
            code=rejection.code.value[0],
        )
    )


def residency_event(delta: ResidencyDelta) -> executor_pb2.ExecutorEvent:
    return executor_pb2.ExecutorEvent(
        residency=executor_pb2.ResidencyDelta(
            number=delta.number,
            added=map(_entry, delta.added),
            removed=map(_entry, delta.removed),
        )
    )


def dropped_event(number: int) -> executor_pb2.ExecutorEvent:
    return executor_pb2.ExecutorEvent(dropped=executor_pb2.Dropped(number=number))


@dataclass(frozen=True, slots=True)
class Load:
    """What the hub knows later than the engine's last status."""

    free_seats: int
    free_slots: int
    waiting: int
    stalled_s: float
    received: int
    cold: tuple[ColdWait, ...] = ()


def load_event(status: Status, load: Load, now: float) -> executor_pb2.ExecutorEvent:
    """`now` is on the clock of the cold waits."""
    rates = status.rates
    return executor_pb2.ExecutorEvent(
        load=executor_pb2.Load(
            state=executor_pb2.LOAD_STATE_DRAINING if status.draining else executor_pb2.LOAD_STATE_READY,
            free_seats=load.free_seats,
            free_kv_blocks=status.free_kv_blocks,
            free_slots=load.free_slots,
            waiting=load.waiting,
            running=status.running,
            last_step_age_ms=round(load.stalled_s * 1000),
            received_dispatches=load.received,
            cold=[_cold_wait(wait, now) for wait in load.cold],
            token_interval_us=_microseconds(rates.token_interval),
            tokens_per_second=round(rates.tokens),
            prompt_tokens_per_second=round(rates.prompt_tokens),
            prompt_tokens_left=rates.prompt_tokens_left,
            answer_tokens_left=rates.answer_tokens_left,
            page_in_us=_microseconds(rates.page_in),
            load_us=_microseconds(rates.load),
        )
    )


def _cold_wait(wait: ColdWait, now: float) -> executor_pb2.ColdWait:
    return executor_pb2.ColdWait(digest=wait.digest, waiting_ms=max(1, round((now - wait.since) * 1000)))


def _microseconds(seconds: float) -> int:
    """The microseconds as the wire holds them: a load that took more than an hour is told as an hour."""
    return min(round(seconds * 1e6), 3_600_000_000)


def _entry(copy: Copy) -> executor_pb2.ResidencyEntry:
    return executor_pb2.ResidencyEntry(
        digest=copy.digest,
        tier=_TIERS[copy.tier],
        slot=copy.slot,
        num_bytes=copy.num_bytes,
        pinned=copy.pinned,
    )


def _logprobs(token: NewToken) -> executor_pb2.DispatchLogprobs:
    drawn = token.token
    return executor_pb2.DispatchLogprobs(
        dispatch_id=token.key[1],
        positions=[_position(drawn.token_id, drawn.logprob, drawn.top)] if token.wants_logprobs else [],
        prompt_positions=map(_prompt_position, token.prompt_scores),
    )


def _prompt_position(score: PromptLogprob) -> common_pb2.PositionLogprobs:
    if score.logprob is None:
        return common_pb2.PositionLogprobs()
    return _position(score.token_id, score.logprob, score.top)


def _position(token_id: int, logprob: float, top: Iterable[tuple[int, float]]) -> common_pb2.PositionLogprobs:
    # From dicts, which takes less than half the time of messages: a long prompt has hundreds of thousands of
    # these, and reports must not wait for them.
    return common_pb2.PositionLogprobs(
        chosen={"token_id": token_id, "logprob": logprob},
        top=[{"token_id": other, "logprob": value} for other, value in top],
    )
