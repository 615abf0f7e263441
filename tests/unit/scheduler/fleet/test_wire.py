import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.v1 import common_pb2, executor_pb2
from scheduler.dispatch.progress import Progress
from scheduler.fleet.rates import UNKNOWN, Rates
from scheduler.fleet.wire import report_of, split_batches, tokens_of
from tests.support.services.scheduling import admitted


def test_a_step_is_taken_apart() -> None:
    step = executor_pb2.StepTokens(
        dispatch_ids=["a", "b", "c"],
        first_output_index=[0, 7, 2],
        token_counts=[2, 0, 1],
        token_ids=[5, 6, 9],
        logprobs=[executor_pb2.DispatchLogprobs(dispatch_id="c", positions=[common_pb2.PositionLogprobs()])],
    )
    made = tokens_of(step)
    assert [(t.dispatch_id, t.first_index, t.token_ids) for t in made] == [
        ("a", 0, (5, 6)),
        ("b", 7, ()),
        ("c", 2, (9,)),
    ]
    assert [len(t.logprobs) for t in made] == [0, 0, 1]


@pytest.mark.parametrize(
    "step",
    [
        executor_pb2.StepTokens(dispatch_ids=["a"], first_output_index=[0], token_counts=[2], token_ids=[5]),
        executor_pb2.StepTokens(dispatch_ids=["a"], token_counts=[1], token_ids=[5]),
        executor_pb2.StepTokens(token_ids=[5]),
    ],
)
def test_arrays_that_disagree_are_refused(step: executor_pb2.StepTokens) -> None:
    with pytest.raises(ValueError):
        tokens_of(step)


def test_cold_waits_are_told_on_our_own_clock() -> None:
    cold = [
        executor_pb2.ColdWait(digest="b", waiting_ms=2500),
        executor_pb2.ColdWait(digest="a", waiting_ms=1),
    ]
    assert report_of(executor_pb2.Load(cold=cold), 100.0).cold == (("b", 97.5), ("a", 99.999))
    assert report_of(executor_pb2.Load(free_seats=3), 100.0).cold == ()


@given(st.lists(st.integers(0, 300), max_size=30))
def test_batches_keep_order_and_stay_small(sizes: list[int]) -> None:
    dispatches = [executor_pb2.Dispatch(prompt_token_ids=[1] * size) for size in sizes]
    batches = list(split_batches(dispatches, 400))
    assert [dispatch for batch in batches for dispatch in batch] == dispatches
    assert all(len(batch) == 1 or sum(d.ByteSize() for d in batch) <= 400 for batch in batches)
    for before, after in itertools.pairwise(batches):  # No batch is split without need.
        assert sum(d.ByteSize() for d in before) + after[0].ByteSize() > 400


@given(st.lists(st.integers(1, 4), max_size=6), st.integers(0, 3))
def test_progress_takes_tokens_once_and_in_order(counts: list[int], resumed: int) -> None:
    progress = Progress(admitted(resumed=range(resumed), max_new_tokens=1000), frozenset())
    expected = list(range(resumed))
    for count in counts:
        fresh = [100 + len(expected) + offset for offset in range(count)]
        assert not progress.accept(len(expected) + 1, fresh)
        assert not progress.accept(len(expected) - 1, fresh)
        assert progress.accept(len(expected), fresh)
        assert not progress.accept(len(expected), fresh)
        expected += fresh
    assert progress.output == expected
    assert list(progress.dispatch("d", 5).output_token_ids) == expected


def test_executors_are_told_by_which_name_a_version_was_asked_for() -> None:
    named = Progress(admitted(digest="d1", tenant="globex"), frozenset())
    assert named.dispatch("d", 0).adapter == "globex/adapter"
    assert Progress(admitted(), frozenset()).dispatch("d", 0).adapter == ""


def test_nothing_left_to_generate() -> None:
    progress = Progress(admitted(max_new_tokens=2), frozenset({9}))
    assert progress.complete is None
    progress.accept(0, [1, 2])
    assert progress.complete == common_pb2.FINISH_REASON_LENGTH
    assert Progress(admitted(resumed=[9]), frozenset({9})).complete == common_pb2.FINISH_REASON_STOP


def test_a_load_tells_how_fast_its_executor_is() -> None:
    told = executor_pb2.Load(
        token_interval_us=12_500,
        tokens_per_second=5000,
        prompt_tokens_per_second=40_000,
        prompt_tokens_left=700,
        answer_tokens_left=9000,
        page_in_us=2000,
        load_us=350_000,
    )
    assert report_of(told, 0.0).rates == Rates(0.0125, 5000, 40_000, 700, 9000, 0.002, 0.35)


def test_an_executor_of_before_does_not_tell_how_fast_it_is() -> None:
    assert report_of(executor_pb2.Load(free_seats=3), 0.0).rates == UNKNOWN
