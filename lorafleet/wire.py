"""Turns the wire's messages into the values of lorafleet/results.py."""

from collections.abc import Iterable

from lorafleet import results
from lorafleet.v1 import adapters_pb2, common_pb2, fleet_pb2, inference_pb2

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: results.FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: results.FinishReason.LENGTH,
    common_pb2.FINISH_REASON_TIME_LIMIT: results.FinishReason.TIME_LIMIT,
}

_STATES = {
    adapters_pb2.VERSION_STATE_UNSPECIFIED: "active",
    adapters_pb2.VERSION_STATE_ACTIVE: "active",
    adapters_pb2.VERSION_STATE_DRAINING: "draining",
    adapters_pb2.VERSION_STATE_DELETED: "deleted",
}


def finish_reason(value: common_pb2.FinishReason) -> results.FinishReason | None:
    """None: not finished."""
    return _FINISH_REASONS.get(value)


def usage(message: inference_pb2.Usage) -> results.Usage:
    return results.Usage(
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        completion_tokens=message.completion_tokens,
    )


def logprobs(positions: Iterable[common_pb2.PositionLogprobs]) -> tuple[results.PositionLogprobs, ...]:
    return tuple(
        results.PositionLogprobs(
            chosen=_token(position.chosen) if position.HasField("chosen") else None,
            top=tuple(_token(token) for token in position.top),
        )
        for position in positions
    )


def _token(message: common_pb2.TokenLogprob) -> results.TokenLogprob:
    return results.TokenLogprob(message.token_id, message.logprob)


def tokenization(message: inference_pb2.TokenizeResponse) -> results.Tokenization:
    return results.Tokenization(tuple(message.token_ids), tuple(message.tokens), message.max_model_len)


def models(message: inference_pb2.ListModelsResponse) -> results.Models:
    """A page of them."""
    adapters = tuple(results.Model(m.adapter, m.digest, m.max_rank) for m in message.models if m.adapter)
    return results.Models(message.base_model, message.fingerprint, message.max_model_len, adapters)


def version(message: adapters_pb2.AdapterVersion) -> results.AdapterVersion:
    return results.AdapterVersion(
        tenant=message.tenant,
        name=message.name,
        digest=message.digest,
        modules=tuple(results.AdapterModule(m.name, m.rank, m.scale) for m in message.modules),
        max_rank=message.max_rank,
        dtypes=tuple(message.dtypes),
        num_bytes=message.num_bytes,
        base_model=message.base_model,
        has_chat_template=message.has_chat_template,
        created_at=message.created_at_ms / 1000,
        protected=message.protected,
        warnings=_warnings(message),
        aliases=tuple(message.aliases),
        state=_STATES[message.state],
        quarantined=message.quarantined,
        full_heads=tuple(message.full_heads),
        end_token_ids=tuple(message.end_token_ids),
        special_tokens=dict(message.special_tokens),
    )


def _warnings(message: adapters_pb2.AdapterVersion) -> tuple[results.PushWarning, ...]:
    if message.push_warnings:
        return tuple(results.PushWarning(each.reason, each.message) for each in message.push_warnings)
    return tuple(results.PushWarning("", text) for text in message.warnings)  # an older scheduler's


def summary(message: adapters_pb2.AdapterVersion) -> results.AdapterSummary:
    return results.AdapterSummary(
        message.tenant,
        message.name,
        message.digest,
        message.max_rank,
        message.num_bytes,
        message.base_model,
        message.created_at_ms / 1000,
        message.protected,
        tuple(message.aliases),
        _STATES[message.state],
        message.quarantined,
    )


def alias(message: adapters_pb2.AdapterAlias) -> results.AdapterAlias:
    return results.AdapterAlias(
        tenant=message.tenant,
        name=message.name,
        alias=message.alias,
        digest=message.digest,
        generation=message.generation,
        targets={target.target: target.weight for target in message.targets},
    )


def push_result(message: adapters_pb2.PushResponse) -> results.PushResult:
    moved = alias(message.alias) if message.HasField("alias") else None
    return results.PushResult(version(message.version), message.created, moved)


def verification(message: adapters_pb2.VerifyResponse) -> results.Verification:
    return results.Verification(message.verified, dict(message.damaged), tuple(message.orphans))


def pinned(message: adapters_pb2.PinResponse) -> results.Pinned:
    return results.Pinned(message.digest, tuple(message.pinned), tuple(message.missing))


def collection(message: adapters_pb2.CollectResponse) -> results.Collection:
    names = zip(message.adapters, message.digests, strict=True)
    return results.Collection(tuple(f"{name}@{digest}" for name, digest in names), message.num_bytes)


def residency(message: adapters_pb2.AdapterResidency) -> results.Residency:
    tier = adapters_pb2.ResidencyTier.Name(message.tier).removeprefix("RESIDENCY_TIER_").lower()
    return results.Residency(
        executor=message.executor,
        digest=message.digest,
        tier=tier,
        slot=message.slot if tier == "slot" else -1,
        running=message.running,
        num_bytes=message.num_bytes,
        pinned=message.pinned,
        max_rank=message.max_rank,
        last_use=message.last_use_ms / 1000,
        loads=message.loads,
        evictions=message.evictions,
        adapters=tuple(message.adapters),
    )


def fleet(message: fleet_pb2.FleetSnapshot) -> results.Fleet:
    executors = tuple(executor(status) for status in message.executors)
    queues = tuple((group.digest, group.waiting) for group in message.queues)
    return results.Fleet(executors, message.waiting, message.groups, queues)


def executor(message: fleet_pb2.ExecutorStatus) -> results.Executor:
    return results.Executor(
        address=message.address,
        state=fleet_pb2.ExecutorState.Name(message.state).removeprefix("EXECUTOR_STATE_").lower(),
        detail=message.detail,
        instance_id=message.instance_id,
        cordoned=message.cordoned,
        running=message.running,
        free_seats=message.free_seats,
        free_kv_blocks=message.free_kv_blocks,
        max_loras=message.max_loras,
        resident=tuple(message.resident),
        max_seats=message.max_seats,
        in_host=message.in_host,
        slot_hits=message.slot_hits,
        host_hits=message.host_hits,
        misses=message.misses,
        page_in_mean=message.page_in_mean_ms / 1000,
        page_in_max=message.page_in_max_ms / 1000,
        on_trial=message.on_trial,
        name=message.name or message.address,  # A scheduler of an earlier release knows addresses only.
        leaving=message.leaving,
        seat_limit=message.seat_limit,
        tripped=message.tripped,
    )
