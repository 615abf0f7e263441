"""The simulated batch plans what the real batcher, slots and blocks do, at each step of random traffic."""

from collections import deque
from random import Random

import pytest

from executor.batch.batcher import Batcher
from executor.batch.batcher import StepPlan as RealPlan
from executor.batch.blocks import BlockPool
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, StopRules
from executor.batch.sequence import Sequence as RealSequence
from executor.batch.slots import SlotTable
from scheduler.simulate.executors.batch import Batch
from scheduler.simulate.executors.kv import Kv
from scheduler.simulate.executors.sequence import Sequence
from scheduler.simulate.executors.slots import Slots
from scheduler.simulate.executors.step_plan import StepPlan

SEATS, AGING_S, STEP_S = 24, 0.5, 0.01
ADAPTERS = [f"adapter-{number}" for number in range(12)]


class Pair:
    """The real batcher and the simulated one, with the same requests and steps."""

    def __init__(
        self, rng: Random, blocks: int, slots: int, block_size: int, tokens: int, ahead: int
    ) -> None:
        self.rng = rng
        self.now = 0.0
        self.ahead = ahead
        self.real = Batcher(
            BlockPool(blocks, block_size, prefix_cache=False),
            SlotTable(slots),
            max_batched_tokens=tokens,
            max_seats=SEATS,
            max_page_ins=2,
            aging_s=AGING_S,
        )
        self.model = Batch(
            Kv(blocks, block_size),
            Slots(slots, dict.fromkeys(ADAPTERS, 8)),
            max_batched_tokens=tokens,
            max_page_ins=2,
            aging_s=AGING_S,
        )
        self.loaded = set(ADAPTERS[:6])
        self.flights: deque[tuple[RealPlan, StepPlan]] = deque()
        self.landed = 0
        self.preempted = self.paged_in = self.count = 0

    def add(self, digest: str, prompt: int, output: int, accepted_at: float) -> None:
        self.count += 1
        name = f"d{self.count}"
        dispatch = Dispatch(
            (0, name), name, digest, (7,) * prompt, (), SamplingParams(), StopRules(), accepted_at=accepted_at
        )
        self.real.add(RealSequence(dispatch, self.count, self.now, prompt + output))
        self.model.add(Sequence(name, digest, prompt, output, (accepted_at, self.count), self.now))

    def cancel(self) -> None:
        name = self.rng.choice(list(self.model.sequences))
        free = self.real.remove(self.real.sequences[0, name])
        assert self.model.remove(self.model.sequences[name], self.landed) == free

    def step(self) -> None:
        self.now += STEP_S
        most = self.rng.choice([None, SEATS, SEATS + 20])
        real = self.real.plan(self.now, self.loaded, most)
        decoding = {s.dispatch_id for s in self.model.running if s.decodes and s.ends_in > self.model.step}
        plan = self.model.plan(self.now, self.loaded, most)
        gone = {sequence.dispatch_id for sequence in plan.preempted}
        tokens = {sequence.dispatch_id: count for sequence, count in plan.prompts.items()}
        assert len(decoding - gone) == plan.decoding
        assert tokens | dict.fromkeys(decoding - gone, 1) == {
            sequence.dispatch.key[1]: count for sequence, count in real.num_tokens.items()
        }
        assert plan.page_ins == [(each.slot, each.digest, each.evicted) for each in real.page_ins]
        assert plan.slot_hits == len(real.slot_hits)
        assert [s.dispatch_id for s in plan.preempted] == [s.dispatch.key[1] for s in real.preempted]
        for page_in in real.page_ins:
            self.real.slots.loaded(page_in.slot)
        if real.num_tokens:
            self.real.launched(real)
            self.flights.append((real, plan))
        self.preempted += len(plan.preempted)
        self.paged_in += len(plan.page_ins)
        while len(self.flights) > (self.ahead if real.num_tokens else 0):
            self.land()
        self.check()

    def land(self) -> None:
        real, plan = self.flights.popleft()
        self.real.landed(real.num_tokens)
        ended = set()
        for sequence in filter(self.real.lives, real.draws):
            sequence.append(7)
            if len(sequence.token_ids) >= sequence.max_length:
                ended.add(sequence.dispatch.key[1])
                assert self.real.remove(sequence)
        self.landed = plan.step
        assert {sequence.dispatch_id for sequence in self.model.landed(plan.step)[0]} == ended

    def check(self) -> None:
        self.real.check()
        assert self.model.kv.num_free == self.real.blocks.num_free
        assert self.model.slots.digests == self.real.slots.digests
        assert self.model.slots.num_used == self.real.slots.in_use
        for mine, theirs in (
            (self.model.running, self.real.running),
            (self.model.waiting, self.real.waiting),
        ):
            assert [s.dispatch_id for s in mine] == [s.dispatch.key[1] for s in theirs]
        assert self.model.wanted() == self.real.wanted()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("blocks", "slots", "block_size"), [(400, 3, 4), (60, 3, 4), (44, 12, 4), (200, 2, 1), (24, 4, 16)]
)
def test_every_step_is_the_real_one(blocks: int, slots: int, block_size: int, ahead: int) -> None:
    """With enough KV blocks and with too few, more adapters than slots, loads that end late, and cancels."""
    rng = Random(f"{blocks} {slots} {ahead}")
    pair = Pair(rng, blocks, slots, block_size, tokens=48, ahead=ahead)
    for number in range(700):
        if number % 100 < 60:  # Then it runs dry.
            while len(pair.model.sequences) < SEATS and rng.random() < 0.4:
                digest = rng.choice(["", *ADAPTERS])
                prompt, output = rng.randint(1, 90), rng.choice([1, 2, rng.randint(3, 60)])
                pair.add(digest, prompt, output, pair.now - rng.choice([0.0, rng.random()]))
        if pair.model.sequences and rng.random() < 0.03:
            pair.cancel()
        if rng.random() < 0.1:
            pair.loaded = {*pair.model.slots.digests, *rng.sample(ADAPTERS, 6)}
        pair.step()
    assert pair.count > 100 and pair.paged_in >= 12
    assert bool(pair.preempted) == (blocks * block_size < 400)
