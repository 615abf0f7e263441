"""Who gets how much of a step that is not enough for all."""

from hypothesis import given
from hypothesis import strategies as st

from executor.batch.batcher import MOST_UNFINISHED, Batcher
from executor.batch.pace import Load
from executor.batch.sequence import Sequence
from tests.unit.executor.batch.batches import add, land, launch, make_batcher, step

PROMPTS = st.lists(st.integers(2, 300), min_size=1, max_size=8)


def large(**settings: int) -> Batcher:
    return make_batcher(**{"blocks": 1500, "block_size": 16, "tokens": 4096, "seats": 64} | settings)


def begun(sequence: Sequence) -> bool:
    return sequence.num_outputs + sequence.ahead > 0


@given(
    decoding=st.integers(0, 10),
    prompts=PROMPTS,
    pauses=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    room=st.integers(8, 90),
    ahead=st.booleans(),
)
def test_budgets_are_kept_streams_go_on_and_prompts_are_done_in_so_many_steps(
    decoding: int, prompts: list[int], pauses: list[int], room: int, ahead: bool
) -> None:
    batcher = large()
    streams = [add(batcher, number, prompt=2) for number in range(decoding)]
    step(batcher)
    arrivals, flights, waits = list(zip(prompts, pauses, strict=False)), [], dict[Sequence, int]()
    pause = 0
    while arrivals or not all(map(begun, waits)) or flights:
        while arrivals and pause == 0:
            count, pause = arrivals.pop(0)
            older = sum(s.uncomputed for s in waits if not begun(s)) + len(waits)
            arrived = add(batcher, 100 + len(waits), prompt=count)
            # Half of the room is for the oldest one; and the step that it comes into may be full.
            waits[arrived] = -(-2 * (older + count) // room) + len(waits) + 2
        pause = max(0, pause - 1)
        load = batcher.load(())
        # The last token of a prompt is as one that decodes, but for its first step.
        waiting = [s for s in waits if not begun(s) and (s.uncomputed > 1 or s.table is None)]
        assert (load.prompts, load.prompt_tokens) == (len(waiting), sum(s.uncomputed for s in waiting))
        flight = launch(batcher, most_tokens=load.decoding + room)
        assert sum(flight.plan.num_tokens.values()) <= load.decoding + room
        assert all(stream in flight.plan.num_tokens for stream in streams)
        if load.prompts:
            wanted = min(room, load.prompt_tokens)
            assert sum(flight.plan.num_tokens.values()) == load.decoding + wanted
        for sequence in waiting:
            waits[sequence] -= 1
            assert waits[sequence] >= 0, "it waits longer than it must"
        flights.append(flight)
        while len(flights) > ahead or (flights and not arrivals and all(map(begun, waits))):
            land(batcher, flights.pop(0))


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    batcher = large()
    stream, long = add(batcher, 0, prompt=2), add(batcher, 1, prompt=3000)
    step(batcher, most_tokens=100)
    short = add(batcher, 2, prompt=40)
    assert step(batcher, most_tokens=101).num_tokens == {stream: 1, long: 100}
    assert step(batcher, most_tokens=101).num_tokens == {stream: 1, long: 60, short: 40}


def test_a_long_prompt_has_half_of_each_step_while_short_ones_keep_coming() -> None:
    batcher = large()
    add(batcher, 0, prompt=2)
    step(batcher)
    long, steps = add(batcher, 1, prompt=1000), 0
    while not begun(long):
        add(batcher, 2 + steps, prompt=80)
        step(batcher, most_tokens=101 + steps)
        steps += 1
    assert steps <= 1000 / 50 + 2


def test_equal_prompts_are_done_one_after_the_other() -> None:
    batcher = large()
    add(batcher, 0, prompt=2)
    step(batcher)
    prompts = [add(batcher, number, prompt=100) for number in range(1, 5)]
    done = []
    while len(done) < 4:
        step(batcher, most_tokens=51)
        done += [prompt.arrival for prompt in prompts if begun(prompt) and prompt.arrival not in done]
    assert done == [1, 2, 3, 4]


def test_an_idle_engine_takes_all() -> None:
    batcher = large()
    prompts = [add(batcher, number, prompt=500) for number in range(8)]
    assert batcher.load(()) == Load(0, 8, 4000)
    assert step(batcher).num_tokens == dict.fromkeys(prompts, 500)
    assert batcher.load(()) == Load(8, 0, 0)


def test_when_a_step_is_full_some_prompts_begin_without_a_token_of_it() -> None:
    batcher = large()
    for number in range(30):
        add(batcher, number, prompt=100)
    assert len(step(batcher, most_tokens=50).num_tokens) == 1
    assert len(batcher.running) == MOST_UNFINISHED


def test_prompts_that_begin_have_blocks_to_the_end() -> None:
    """Each fits alone. Two would take blocks from one another once they are computed."""
    batcher = make_batcher(blocks=30, block_size=4, tokens=64)
    add(batcher, 0, prompt=2)
    step(batcher)
    for number in (1, 2):
        add(batcher, number, prompt=80)
    for _ in range(9):
        assert not step(batcher, most_tokens=11).preempted
    assert [len(batcher.running), len(batcher.waiting)] == [2, 1]


def test_a_prompt_that_begins_without_a_token_uses_what_is_cached_when_it_gets_one() -> None:
    """As if it had waited: those in front of it may have computed its prefix meanwhile."""
    batcher = large()
    first, second = add(batcher, 1, prompt=100), add(batcher, 2, prompt=100)
    second.token_ids[:90] = first.token_ids[:90]
    step(batcher, most_tokens=60)
    assert second in batcher.running
    step(batcher, most_tokens=40)
    plan = step(batcher, most_tokens=50)
    assert (plan.num_tokens[second], plan.looked_up, plan.cached) == (20, 100, 80)
    assert second.cached_prompt_tokens == 80


def test_what_may_begin_counts_as_load() -> None:
    batcher = make_batcher(slots=2, page_ins=1)
    for number, digest in enumerate(("L1", "L2", "L2", "L3", "")):
        add(batcher, number, digest, prompt=5)
    assert batcher.load({"L1"}) == Load(0, 2, 10)  # the one that is loaded, and the one without adapter
    assert batcher.load({"L1", "L2"}) == Load(0, 2, 10)  # one page-in a step
    batcher.max_page_ins = 2
    step(batcher, loaded={"L1", "L2"})
    assert batcher.load({"L1", "L2", "L3"}) == Load(4, 0, 0)  # no slot is left
