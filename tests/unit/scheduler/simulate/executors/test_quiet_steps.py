"""Skipping over quiet steps changes nothing of what a simulated executor says, nor when.

But for the free KV blocks of a report between two beats, which nobody plans by.
"""

from dataclasses import replace
from random import Random

import pytest

from scheduler.simulate.adapters import Catalog, digest_of
from scheduler.simulate.clock import Clock
from scheduler.simulate.costs import read_costs
from scheduler.simulate.executors.executor import Executor
from scheduler.simulate.executors.messages import Dispatched, Said
from scheduler.simulate.executors.settings import ExecutorSettings

SETTINGS = ExecutorSettings(seats=12, slots=3, kv_blocks=400, host_bytes=500_000_000, aging_s=0.3)
Told = list[tuple[float, str]]


def played(
    seed: int, settings: ExecutorSettings, steps_ahead: int, *, single_steps: bool
) -> tuple[Executor, Told]:
    """What was told of first tokens, ends and room, and when."""
    rng, clock, told = Random(seed), Clock(), Told()
    costs = replace(read_costs(), steps_ahead=steps_ahead)
    catalog = Catalog.of(8, (8, 16), costs.rank_bytes)
    executor = Executor(clock, "e", settings, costs, catalog, single_steps=single_steps)
    seen = set[str]()

    def take(said: Said) -> None:
        for dispatch_id, tokens in said.tokens:
            if dispatch_id not in seen:
                seen.add(dispatch_id)
                told.append((clock.now, f"first {dispatch_id} {tokens}"))
        told.extend((clock.now, f"end {dispatch_id}") for dispatch_id, _ in said.finished)
        told.extend((clock.now, f"rejected {dispatch_id}") for dispatch_id in said.rejected)
        if said.delta:
            told.append((clock.now, f"copies {said.delta}"))
        if said.report and not clock.now.is_integer():  # Those of each second come with what changed, too.
            told.append((clock.now, f"{replace(said.report, free_kv_blocks=0)}"))

    stream = executor.connect(take)
    at = 0.0
    for number in range(60):
        at += rng.choice([0.0, rng.expovariate(20.0), rng.expovariate(0.8)])
        digest = "" if rng.random() < 0.2 else digest_of(rng.randrange(8))
        asked = Dispatched(f"d{number}", digest, rng.randint(1, 900), rng.randint(1, 300), at)
        clock.at(at, executor.receive, stream, [asked])
        if rng.random() < 0.2:
            clock.at(at + rng.random(), executor.cancel, stream, asked.dispatch_id)
        if rng.random() < 0.2:
            clock.at(at, executor.hint, digest_of(rng.randrange(8)), 0.1, 1)
    clock.run(at + 60.0)
    assert not executor.batch.sequences and executor.batch.kv.num_free == settings.kv_blocks
    assert executor.free_seats == settings.seats and executor.free_slots == settings.slots
    return executor, told


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("kv_blocks", [400, 120])
def test_both_forms_say_the_same_at_the_same_time(kv_blocks: int, steps_ahead: int) -> None:
    settings = replace(SETTINGS, kv_blocks=kv_blocks)
    for seed in range(3):
        slow, singly = played(seed, settings, steps_ahead, single_steps=True)
        fast, skipping = played(seed, settings, steps_ahead, single_steps=False)
        assert [what for _, what in skipping] == [what for _, what in singly]
        assert [at for at, _ in skipping] == pytest.approx([at for at, _ in singly], abs=1e-6)
        assert fast.num_steps == slow.num_steps and fast.num_page_ins == slow.num_page_ins > 10
        assert bool(fast.num_preempted) == bool(slow.num_preempted) == (kv_blocks < 200)
