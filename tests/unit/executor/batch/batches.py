"""A batcher, and what the engine does around its plans."""

from collections.abc import Container
from dataclasses import dataclass

from executor.batch.batcher import Batcher, StepPlan
from executor.batch.blocks import BlockPool
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, Sequence, StopRules
from executor.batch.slots import SlotTable

ALL = frozenset({"L1", "L2", "L3", "L4", "L5", "A", "B"})


def make_batcher(
    *,
    blocks: int = 64,
    block_size: int = 4,
    slots: int = 2,
    tokens: int = 32,
    seats: int = 16,
    aging: float = 5.0,
    page_ins: int = 16,
) -> Batcher:
    return Batcher(
        BlockPool(blocks, block_size),
        SlotTable(slots),
        max_batched_tokens=tokens,
        max_seats=seats,
        max_page_ins=page_ins,
        aging_s=aging,
    )


def add(
    batcher: Batcher,
    number: int,
    digest: str = "",
    prompt: int = 5,
    at: float = 0.0,
    accepted_at: float = 0.0,
) -> Sequence:
    dispatch = Dispatch(
        key=(0, f"d{number}"),
        request_id=f"r{number}",
        digest=digest,
        prompt_token_ids=tuple(100 * number + i for i in range(prompt)),
        output_token_ids=(),
        sampling=SamplingParams(),
        stop=StopRules(),
        accepted_at=accepted_at,
    )
    sequence = Sequence(dispatch, number, at)
    batcher.add(sequence)
    return sequence


def step(
    batcher: Batcher, now: float = 0.0, loaded: Container[str] = ALL, most_tokens: int | None = None
) -> StepPlan:
    """What the engine does around a plan, with a token drawn wherever one is due."""
    flight = launch(batcher, now, loaded, most_tokens)
    land(batcher, flight)
    return flight.plan


@dataclass(frozen=True)
class Flight:
    plan: StepPlan
    computed: dict[Sequence, int]  # tokens of each when it is over


def launch(
    batcher: Batcher, now: float = 0.0, loaded: Container[str] = ALL, most_tokens: int | None = None
) -> Flight:
    plan = batcher.plan(now, loaded, most_tokens)
    for page_in in plan.page_ins:
        batcher.slots.loaded(page_in.slot)
    batcher.launched(plan)
    batcher.check()
    return Flight(plan, {sequence: sequence.computed for sequence in plan.num_tokens})


def land(batcher: Batcher, flight: Flight) -> list[Sequence]:
    """Returns those who have ended and hold nothing any more."""
    gone = batcher.landed(flight.plan.num_tokens)
    for sequence in filter(batcher.lives, flight.plan.num_tokens):
        batcher.commit(sequence, flight.computed[sequence])
        if sequence in flight.plan.draws:
            sequence.append(7)
    batcher.check()
    return gone
