from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.batch.batcher import MAX_SCORED, StepPlan
from executor.batch.sequence import Sequence
from tests.unit.executor.batch.batches import ALL, Flight, add, land, launch, make_batcher, step


def planned(plan: StepPlan) -> list[str]:
    return [s.dispatch.key[1] for s in sorted(plan.num_tokens, key=lambda s: s.arrival)]


def test_prompts_whose_log_probabilities_are_wanted_bring_few_rows_of_logits() -> None:
    batcher = make_batcher(blocks=1000, tokens=4096)
    scored = [add(batcher, number, prompt=600) for number in range(3)]
    plain = add(batcher, 3, prompt=600)
    for sequence in scored:
        sequence.dispatch = replace(sequence.dispatch, prompt_logprobs=1)
    steps = []
    while any(sequence.computed < 600 for sequence in scored):
        steps.append(step(batcher))
    assert [steps[0].num_tokens[sequence] for sequence in (*scored, plain)] == [MAX_SCORED, 1, 1, 600]
    for plan in steps:
        assert sum(plan.num_tokens.get(each, 0) for each in scored) <= MAX_SCORED + len(scored)
    assert len(steps) == 4


def test_a_page_in_spares_the_adapter_of_who_starts_behind_it() -> None:
    batcher = make_batcher()
    former = [add(batcher, 1, "L1"), add(batcher, 2, "L2"), add(batcher, 3, "L2")]
    step(batcher)
    for sequence in former:
        batcher.remove(sequence)
    add(batcher, 4, "L3")
    add(batcher, 5, "L1")  # less used than L2, but wanted now
    plan = step(batcher)
    assert [page_in.evicted for page_in in plan.page_ins] == ["L2"]
    assert plan.slot_hits == ["L1"]


def test_long_prompts_are_cut_and_everyone_running_gets_a_token() -> None:
    batcher = make_batcher(tokens=8, seats=4)
    first, second = add(batcher, 1, prompt=3), add(batcher, 2, prompt=20)
    assert step(batcher).num_tokens == {first: 3, second: 5}
    assert step(batcher).num_tokens == {first: 1, second: 7}
    third = add(batcher, 3, prompt=2)
    assert step(batcher).num_tokens == {first: 1, second: 7}
    assert step(batcher).num_tokens == {first: 1, second: 1, third: 2}


def test_only_the_unplaceable_adapter_waits() -> None:
    batcher = make_batcher(slots=4, tokens=128, seats=32)
    digests = ["", "", "", "L1", "L3", "L2", "L4", "L5", "L5", "L5", "L5", "", "", "L1", "L2", "L3"]
    for number, digest in enumerate(digests):
        add(batcher, number, digest)
    plan = step(batcher)
    assert planned(plan) == [f"d{n}" for n, digest in enumerate(digests) if digest != "L5"]
    assert batcher.wanted() == ["L5"]


def test_base_takes_no_slot() -> None:
    batcher = make_batcher(slots=2)
    sequences = [add(batcher, n, digest) for n, digest in enumerate(["L1", "L2", "L3", ""])]
    assert planned(step(batcher)) == ["d0", "d1", "d3"]
    assert sequences[3].slot == -1
    batcher.remove(sequences[0])
    plan = step(batcher)
    assert planned(plan) == ["d1", "d2", "d3"]
    assert [(p.slot, p.digest, p.evicted) for p in plan.page_ins] == [(0, "L3", "L1")]


def test_an_adapter_that_is_not_loaded_holds_up_nobody() -> None:
    batcher = make_batcher()
    add(batcher, 1, "L1")
    add(batcher, 2, "L2")
    assert planned(step(batcher, loaded={"L2"})) == ["d2"]
    assert planned(step(batcher, loaded={"L1", "L2"})) == ["d1", "d2"]


def test_a_sequence_without_kv_room_takes_no_slot() -> None:
    batcher = make_batcher(blocks=4, slots=1)
    add(batcher, 1, prompt=8)
    add(batcher, 2, "L1", prompt=8)
    assert planned(step(batcher)) == ["d1"]
    assert batcher.slots.digests == {}


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens() -> None:
    batcher = make_batcher(blocks=4, block_size=4, slots=1)
    old, young = add(batcher, 1, prompt=7), add(batcher, 2, "L1", prompt=7)
    for _ in range(2):
        assert planned(step(batcher)) == ["d1", "d2"]
    plan = step(batcher)
    assert plan.preempted == [young]
    assert planned(plan) == ["d1"]
    assert (young.table, young.slot, young.computed) == (None, -1, 0)
    assert len(young.token_ids) == 9
    batcher.remove(old)
    assert planned(step(batcher)) == ["d2"]
    assert list(young.token_ids[:9]) == [*range(200, 207), 7, 7]


def test_a_cold_adapter_waits_no_longer_than_the_aging_bound_and_what_runs() -> None:
    batcher = make_batcher(slots=1, aging=5.0)
    hot = [add(batcher, n, "A", prompt=2) for n in range(1, 4)]
    now, number, started = 0.0, 10, 0.0
    cold = None
    for tick in range(200):
        now = tick * 0.5
        if tick == 10:
            cold = add(batcher, 9, "B", prompt=2, at=now)
        hot.append(add(batcher, number, "A", prompt=2, at=now))
        number += 1
        plan = step(batcher, now)
        if cold in plan.num_tokens:
            started = now
            break
        for sequence in [s for s in hot if s.table and s.num_outputs >= 6]:
            batcher.remove(sequence)
            hot.remove(sequence)
    # Aged at 10.0 s; what ran then had at most 6 steps of 0.5 s left.
    assert 10.0 <= started <= 13.5


def test_who_waited_when_an_adapter_came_in_joins_it_although_others_starve() -> None:
    """Else each turn of an adapter serves one of those who wait for it, and it pages in for each of them."""
    batcher = make_batcher(slots=1, aging=1.0)
    add(batcher, 1, "A")
    step(batcher)
    for number, digest in ((2, "B"), (3, "C"), (4, "B")):
        add(batcher, number, digest, at=0.0)
    batcher.remove(batcher.running[0])
    loaded = frozenset("BC")
    assert planned(step(batcher, now=5.0, loaded=loaded)) == ["d2", "d4"]
    add(batcher, 5, "B", at=5.0)
    assert planned(step(batcher, now=5.1, loaded=loaded)) == ["d2", "d4"]


def test_a_backlog_of_many_adapters_over_few_slots_pages_each_in_once() -> None:
    batcher = make_batcher(blocks=1200, block_size=16, slots=16, tokens=1024, seats=256, aging=2.0)
    wanted = Random(5).choices([f"L{n}" for n in range(128)], k=256)
    live = [add(batcher, number, digest, prompt=32) for number, digest in enumerate(wanted)]
    paged_in, now = list[str](), 0.0
    while live:
        now += 0.5  # most wait longer than they may
        paged_in += [each.digest for each in step(batcher, now, loaded=frozenset(wanted)).page_ins]
        for sequence in [each for each in live if each.num_outputs >= 16]:
            batcher.remove(sequence)
            live.remove(sequence)
    assert sorted(paged_in) == sorted(set(wanted))


def test_adapters_of_a_burst_come_in_by_who_waits_longest_at_its_scheduler() -> None:
    batcher = make_batcher(slots=1)
    add(batcher, 1, "A")
    step(batcher)
    for number, digest, accepted_at in ((2, "L1", 3.0), (3, "L2", 1.0), (4, "L3", 2.0), (5, "L1", 4.0)):
        add(batcher, number, digest, accepted_at=accepted_at)
    assert batcher.wanted() == ["L2", "L3", "L1"]  # in this order they are loaded into host memory, too
    served = []
    while batcher.waiting:
        batcher.remove(batcher.running[0])
        served += [page_in.digest for page_in in step(batcher).page_ins]
    assert served == ["L2", "L3", "L1"]


def test_base_goes_on_while_a_cold_adapter_ages() -> None:
    batcher = make_batcher(slots=1, aging=1.0)
    add(batcher, 1, "A")
    step(batcher)
    add(batcher, 2, "B", at=0.0)
    add(batcher, 3, "A", at=0.0)
    add(batcher, 4, at=0.0)
    assert planned(step(batcher, now=2.0)) == ["d1", "d4"]


def test_prompt_logprobs_compute_every_token() -> None:
    batcher = make_batcher()
    first = add(batcher, 1, prompt=9)
    step(batcher)
    for wanted, cached in ((None, 8), (2, 0)):
        dispatch = replace(first.dispatch, key=(0, f"again{wanted}"), prompt_logprobs=wanted)
        again = Sequence(dispatch, 5, 0.0)
        batcher.add(again)
        step(batcher)
        assert again.cached_prompt_tokens == cached


def test_fewer_tokens_a_step_than_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="seats"):
        make_batcher(tokens=4, seats=5)


def test_so_many_page_ins_a_step_and_no_more() -> None:
    batcher = make_batcher(slots=4, page_ins=2)
    for number, digest in enumerate(["L1", "L2", "L3", "L1", ""]):
        add(batcher, number, digest)
    assert planned(step(batcher)) == ["d0", "d1", "d3", "d4"]
    assert planned(step(batcher)) == ["d0", "d1", "d2", "d3", "d4"]


def test_a_step_ahead_counts_on_what_the_one_before_it_will_bring() -> None:
    batcher = make_batcher(tokens=16)
    sequence = add(batcher, 1, prompt=5)
    sequence.max_length = 7
    first, second = launch(batcher), launch(batcher)
    assert (first.plan.num_tokens, second.plan.num_tokens) == ({sequence: 5}, {sequence: 1})
    assert first.plan.draws == second.plan.draws == [sequence]
    assert launch(batcher).plan.num_tokens == {}  # it is at its length
    land(batcher, first)
    land(batcher, second)
    assert (len(sequence.token_ids), sequence.ahead, sequence.in_flight) == (7, 0, 0)


def test_what_has_ended_is_held_until_its_last_step_is_over() -> None:
    batcher = make_batcher(slots=1, blocks=4)
    first = add(batcher, 1, "L1", prompt=6)
    flights = [launch(batcher), launch(batcher)]
    assert batcher.remove(first) is False
    add(batcher, 2, "L2", prompt=6)
    assert batcher.free_seats == 15
    assert batcher.wanted() == ["L2"]
    assert not launch(batcher).plan.num_tokens
    assert land(batcher, flights[0]) == []
    assert not launch(batcher).plan.num_tokens
    assert land(batcher, flights[1]) == [first]
    assert [p.evicted for p in launch(batcher).plan.page_ins] == ["L1"]


class BatcherMachine(RuleBasedStateMachine):
    """Arrivals, cancels, drops and steps in any order, in a pool that holds about three sequences; steps are
    planned in turn or one ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.flight: Flight | None = None
        self.batcher = make_batcher(blocks=9, block_size=2, slots=2, tokens=6, seats=5, aging=3.0)
        self.number = 0
        self.now = 0.0
        self.loaded: set[str] = set()

    @precondition(lambda self: self.batcher.free_seats > 0)
    @rule(digest=st.sampled_from(["", "A", "B", "L1", "L2"]), prompt=st.integers(1, 12))
    def arrive(self, digest: str, prompt: int) -> None:
        self.number += 1
        add(self.batcher, self.number, digest, prompt, self.now).max_length = 16

    @precondition(lambda self: self.batcher.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        keys = sorted(self.batcher.sequences)
        self.batcher.remove(self.batcher.sequences[data.draw(st.sampled_from(keys))])

    @rule(digest=st.sampled_from(["A", "B", "L1", "L2"]), there=st.booleans())
    def host(self, digest: str, there: bool) -> None:
        (self.loaded.add if there else self.loaded.discard)(digest)

    @rule(seconds=st.sampled_from([0.1, 4.0]), ahead=st.booleans(), room=st.sampled_from([1, 2, 6]))
    def run(self, seconds: float, ahead: bool, room: int) -> None:
        self.now += seconds
        oldest = self.batcher.running[:1]
        decoding = [s for s in self.batcher.running if s.uncomputed == 1]
        most = min(6, len(decoding) + room)
        flight = launch(self.batcher, self.now, self.loaded, most)
        plan = flight.plan
        assert sum(plan.num_tokens.values()) <= most
        assert {*decoding} <= {*plan.num_tokens, *plan.preempted}
        assert all(count > 0 for count in plan.num_tokens.values())
        assert not set(plan.preempted) & set(plan.num_tokens)
        assert not set(plan.num_tokens) & set(self.batcher.leaving)
        assert len({s.digest for s in plan.num_tokens if s.digest}) <= 2
        # The oldest runner always gets on, so everything ends; unless it has all that it will ever have, or
        # what it lacks is held by one that is leaving.
        if oldest and len(oldest[0].token_ids) + oldest[0].ahead < 16 and not self.batcher.leaving:
            assert oldest[0] in plan.num_tokens
        flights, self.flight = [self.flight, flight], None
        if ahead and plan.num_tokens:
            self.flight = flights.pop()
        for each in filter(None, flights):
            land(self.batcher, each)
        for sequence in [s for s in self.batcher.sequences.values() if len(s.token_ids) >= 16]:
            self.batcher.remove(sequence)

    @invariant()
    def balanced(self) -> None:
        self.batcher.check()

    def teardown(self) -> None:
        self.loaded = set(ALL)
        for _ in range(400):
            if not self.batcher.sequences:
                break
            self.run(4.0, False, 6)
        self.run(4.0, False, 6)
        assert not self.batcher.sequences, "left waiting for ever"
        assert not self.batcher.leaving
        assert self.batcher.blocks.num_free == 9
        assert self.batcher.slots.in_use == 0


TestBatcherMachine = BatcherMachine.TestCase
TestBatcherMachine.settings = settings(max_examples=60, stateful_step_count=40)
