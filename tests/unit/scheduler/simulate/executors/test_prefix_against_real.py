"""The next turn of a simulated session finds in the KV cache what the real prefix cache has of it."""

from random import Random

import pytest

from executor.batch.batcher import Batcher
from executor.batch.blocks import BlockPool
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, StopRules
from executor.batch.sequence import Sequence as RealSequence
from executor.batch.slots import SlotTable
from scheduler.simulate.executors.batch import Batch
from scheduler.simulate.executors.kv import Kv
from scheduler.simulate.executors.sequence import Sequence
from scheduler.simulate.executors.slots import Slots

BUDGETS = {"max_batched_tokens": 64, "max_page_ins": 4, "aging_s": 1.0}


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_turns_of_sessions(block_size: int) -> None:
    rng = Random(block_size)
    real = Batcher(BlockPool(4000, block_size), SlotTable(2), max_seats=8, **BUDGETS)
    model = Batch(Kv(4000, block_size), Slots(2, {}), **BUDGETS)
    said: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    found = 0
    for turn in range(8):
        asked = dict[str, tuple[RealSequence, Sequence]]()
        for number, (session, before) in enumerate(said.items()):
            prompt = [*before, *(rng.randrange(1000) for _ in range(rng.randint(1, 40)))]
            output, name = rng.randint(1, 30), f"{session}{turn}"
            dispatch = Dispatch((0, name), name, "", tuple(prompt), (), SamplingParams(), StopRules())
            theirs = RealSequence(dispatch, 3 * turn + number, 0.0, len(prompt) + output)
            mine = Sequence(
                name, "", len(prompt), output, (0.0, 3 * turn + number), 0.0, session, len(before)
            )
            real.add(theirs)
            model.add(mine)
            asked[session] = theirs, mine
        while real.sequences:
            _step(real, model, rng)
        for session, (theirs, mine) in asked.items():
            assert mine.cached == theirs.cached_prompt_tokens
            found += mine.cached
            said[session] = list(theirs.token_ids)
    assert found and not model.sequences


def _step(real: Batcher, model: Batch, rng: Random) -> None:
    plan = real.plan(0.0, ())
    simulated = model.plan(0.0, ())
    assert simulated.decoding + simulated.prompt_tokens == sum(plan.num_tokens.values())
    real.launched(plan)
    real.landed(plan.num_tokens)
    for sequence in plan.num_tokens:
        real.commit(sequence, sequence.computed)
        if sequence in plan.draws:
            sequence.append(rng.randrange(1000))
            if len(sequence.token_ids) == sequence.max_length:
                real.remove(sequence)
    model.landed(simulated.step)
    assert model.kv.num_free == real.blocks.num_free
