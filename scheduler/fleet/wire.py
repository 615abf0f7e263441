"""Turns executors' messages into dataclasses, and back."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from lorafleet.v1 import adapters_pb2, common_pb2, executor_pb2
from scheduler.fleet.rates import Rates
from scheduler.fleet.residency import Copy, Tier
from scheduler.fleet.state import ExecutorState, Limits, Report


class Tokens(NamedTuple):
    """What one step made for one dispatch. `prompt_logprobs` come once, with the first token."""

    dispatch_id: str
    first_index: int  # In the output, tokens of earlier attempts included.
    token_ids: tuple[int, ...]
    logprobs: tuple[common_pb2.PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[common_pb2.PositionLogprobs, ...] = ()


def tokens_of(step: executor_pb2.StepTokens) -> list[Tokens]:
    """Takes a step's parallel arrays apart; ValueError when their lengths disagree."""
    logprobs = {entry.dispatch_id: entry for entry in step.logprobs}
    token_ids = tuple(step.token_ids)  # one look at the message, not one for each dispatch
    if sum(step.token_counts) != len(token_ids):
        raise ValueError(f"step {step.step}: token_counts do not add up to the number of token_ids")
    made, end = list[Tokens](), 0
    for dispatch_id, first, count in zip(
        step.dispatch_ids, step.first_output_index, step.token_counts, strict=True
    ):
        start, end = end, end + count
        tokens = Tokens(dispatch_id, first, token_ids[start:end])
        if entry := logprobs.get(dispatch_id):
            tokens = tokens._replace(
                logprobs=tuple(entry.positions), prompt_logprobs=tuple(entry.prompt_positions)
            )
        made.append(tokens)
    return made


def limits_of(hello: executor_pb2.Hello) -> Limits:
    return Limits(
        max_model_len=hello.max_model_len,
        max_rank=hello.max_rank,
        modules=frozenset(hello.modules),
        max_loras=hello.max_loras,
        max_seats=hello.max_seats,
        max_full_heads=hello.max_full_heads,
        tells_drops=hello.tells_drops,
        knows_waits=hello.knows_waits,
        knows_constraints=hello.knows_constraints,
    )


def report_of(load: executor_pb2.Load, now: float) -> Report:
    """`now` is when it came, on a monotonic clock."""
    return Report(
        free_seats=load.free_seats,
        free_slots=load.free_slots,
        free_kv_blocks=load.free_kv_blocks,
        waiting=load.waiting,
        running=load.running,
        received=load.received_dispatches,
        cold=tuple((wait.digest, now - wait.waiting_ms / 1000) for wait in load.cold),
        rates=_rates_of(load),
    )


def _rates_of(load: executor_pb2.Load) -> Rates:
    return Rates(
        token_interval=load.token_interval_us / 1e6,
        tokens=load.tokens_per_second,
        prompt_tokens=load.prompt_tokens_per_second,
        prompt_tokens_left=load.prompt_tokens_left,
        answer_tokens_left=load.answer_tokens_left,
        page_in=load.page_in_us / 1e6,
        load=load.load_us / 1e6,
    )


def copies_of(entries: Iterable[executor_pb2.ResidencyEntry]) -> list[Copy]:
    return [
        Copy(entry.digest, Tier(entry.tier), entry.slot, entry.num_bytes, entry.pinned) for entry in entries
    ]


def split_batches(
    dispatches: Iterable[executor_pb2.Dispatch], max_bytes: int
) -> Iterator[list[executor_pb2.Dispatch]]:
    """The same dispatches in the same order, in lists of at most `max_bytes` (or of one dispatch)."""
    batch: list[executor_pb2.Dispatch] = []
    size = 0
    for dispatch in dispatches:
        dispatch_size = dispatch.ByteSize()
        if batch and size + dispatch_size > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(dispatch)
        size += dispatch_size
    if batch:
        yield batch


def residency_rows(state: ExecutorState, epoch: float) -> list[adapters_pb2.AdapterResidency]:
    """What the Adapters service shows of one executor. `epoch` is when, in unix seconds, the clock of its
    usage was 0."""
    rows = []
    for copy in state.residency.copies():
        comings = state.residency.comings(copy.digest, copy.tier)
        last_use = state.last_use(copy.digest)
        rows.append(
            adapters_pb2.AdapterResidency(
                executor=state.name,
                digest=copy.digest,
                tier=cast(adapters_pb2.ResidencyTier, int(copy.tier)),
                slot=copy.slot,
                running=state.claims(copy.digest),
                num_bytes=copy.num_bytes,
                pinned=copy.pinned,
                last_use_ms=0 if last_use is None else int((epoch + last_use) * 1000),
                loads=comings.loads,
                evictions=comings.evictions,
            )
        )
    return rows
