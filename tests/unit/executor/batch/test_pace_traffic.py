"""Gaps and first tokens of a load in virtual time: steps take what an 8B model takes on an H200."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest

from executor.batch.batcher import Batcher, StepPlan
from executor.batch.pace import Pace, StepTimes
from executor.batch.sequence import Sequence
from tests.unit.executor.batch.batches import add, make_batcher

CAPTURED = (32, 64, *range(128, 385, 64), 512)
HOST_S, LAUNCH_S = 0.0015, 0.02  # of a captured step, and of others
MOST, LONGEST = 8192, 1 << 20


@dataclass(frozen=True)
class Step:
    plan: StepPlan
    host_s: float
    ends_at: float


@dataclass
class World:
    """The heartbeat, one step ahead, around a device that only takes time."""

    pace: Pace | None
    batcher: Batcher = field(
        default_factory=lambda: make_batcher(blocks=40_000, block_size=16, tokens=MOST, seats=256)
    )
    now: float = 0.0
    landed_at: float = 0.0
    steps: deque[Step] = field(default_factory=deque)
    told_at: dict[Sequence, float] = field(default_factory=dict)  # its last token
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    def play(self, arrivals: list[tuple[float, int, int]]) -> None:
        """(seconds, prompt tokens, tokens back) of each."""
        coming, number = deque(arrivals), 0
        while coming or self.batcher.sequences or self.steps:
            while coming and coming[0][0] <= self.now and self.batcher.free_seats:
                at, prompt, back = coming.popleft()
                add(self.batcher, number, prompt=prompt, at=at).max_length = prompt + back
                number += 1
            if not self.beat():
                self.now = max(self.now, coming[0][0]) if coming else self.now

    def beat(self) -> bool:
        most = self.pace.most_tokens(self.batcher.load(())) if self.pace else MOST
        plan, behind = self.batcher.plan(self.now, (), most), self.steps.popleft() if self.steps else None
        launched_s = 0.0
        if plan.num_tokens:
            self.launch(plan, behind)
            launched_s = self.steps[-1].host_s
        if behind:
            self.land(behind, launched_s)
        return bool(plan.num_tokens or behind)

    def launch(self, plan: StepPlan, behind: Step | None) -> None:
        rows = sum(plan.num_tokens.values())
        decode = rows == len(plan.num_tokens)
        size = next((size for size in CAPTURED if size >= rows), 0)
        host_s = HOST_S if size or decode else LAUNCH_S
        device_s = 0.0045 + 0.00003 * rows if decode else max(0.0055, 0.0042 + 0.0000222 * (size or rows))
        starts_at = max(self.now, behind.ends_at if behind else 0.0)
        self.now += host_s
        self.steps.append(Step(plan, host_s, max(self.now, starts_at + device_s)))
        self.batcher.launched(plan)

    def land(self, step: Step, launched_s: float) -> None:
        self.now = max(self.now, step.ends_at)
        self.batcher.landed(step.plan.num_tokens)
        for sequence in filter(self.batcher.lives, step.plan.draws):
            sequence.append(7)
            if sequence in self.told_at:
                self.gaps.append(self.now - self.told_at[sequence])
            else:
                self.firsts.append(self.now - sequence.arrived_at)
            self.told_at[sequence] = self.now
            if len(sequence.token_ids) == sequence.max_length:
                self.batcher.remove(sequence)
        rows, seconds = sum(step.plan.num_tokens.values()), max(step.host_s, self.now - self.landed_at)
        if self.pace and launched_s - step.host_s <= seconds / 2:
            self.pace.times.observe(rows, rows == len(step.plan.num_tokens), seconds)
        self.landed_at = self.now


def played(arrivals: list[tuple[float, int, int]], *, bound: bool) -> World:
    world = World(Pace(StepTimes(CAPTURED, MOST), MOST, None) if bound else None)
    world.play(arrivals)
    return world


def traffic(rate: float, seconds: float) -> list[tuple[float, int, int]]:
    draw, arrivals, now = Random(5), list[tuple[float, int, int]](), 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        arrivals.append((now, draw.randint(128, 1024), draw.randint(64, 256)))
    return arrivals


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def test_gaps_are_short_while_prompts_come() -> None:
    load = traffic(17, 6.0)
    before, now = played(load, bound=False), played(load, bound=True)
    assert percentile(before.gaps, 0.99) > 0.019
    assert percentile(now.gaps, 0.99) <= 0.015
    assert max(now.gaps) <= 0.018
    assert percentile(now.firsts, 0.5) <= 0.07
    assert max(now.firsts) <= 0.25


def test_beyond_capacity_as_much_is_done() -> None:
    load = traffic(60, 8.0)
    before, now = played(load, bound=False), played(load, bound=True)
    assert now.now <= 1.02 * before.now
    assert percentile(now.gaps, 0.99) < percentile(before.gaps, 0.99) / 2


@pytest.mark.parametrize("over_s", [0.0, 0.025])
@pytest.mark.parametrize(("requests", "prompt"), [(64, 128), (256, 256)])
def test_a_burst_takes_as_long_as_without_a_bound(requests: int, prompt: int, over_s: float) -> None:
    load = [(over_s * number / requests, prompt, 128) for number in range(requests)]
    assert played(load, bound=True).now <= 1.01 * played(load, bound=False).now
