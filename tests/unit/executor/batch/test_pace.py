"""How long steps take, as learned from their times, and how many tokens the next one gets."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.batch.pace import (
    BOUND_STEPS,
    CROWD,
    CROWD_BOUNDS,
    CROWD_STEPS,
    LEAST_TOKENS,
    QUIET_STEPS,
    SPREAD_STEPS,
    Load,
    Pace,
    StepTimes,
)

CAPTURED, MOST = (32, 64, *range(128, 385, 64), 512), 8192
LAUNCH_S = 0.02  # of a step that is not captured


def seconds(rows: int, *, decode: bool = False) -> float:
    """Of a step on an imaginary GPU."""
    if decode:
        return 0.005 + 0.00001 * rows
    size = next((size for size in CAPTURED if size >= rows), 0)
    return max(0.0055, 0.004 + 0.00002 * (size or rows), 0.0 if size else LAUNCH_S)


def learned() -> StepTimes:
    """From some steps of each size."""
    times = StepTimes(CAPTURED, MOST)
    rows = 1
    while rows < MOST:
        rows = times.size_for(rows + 1)
        times.observe(rows, False, seconds(rows))
        times.observe(rows, True, seconds(rows, decode=True))
    return times


def test_nothing_known_is_no_time() -> None:
    times = StepTimes(CAPTURED, MOST)
    assert (times.rows_within(1.0), times.decode(5)) == (0, 0.0)


def test_the_largest_size_in_time_is_found() -> None:
    times = learned()
    assert times.rows_within(0.0054) == 0
    assert times.rows_within(seconds(384)) == 384
    # The next size takes longer a row: it is launched kernel by kernel.
    assert times.rows_within(0.019) == 512
    assert times.rows_within(1.0) == MOST


def test_captured_sizes_are_kept_and_those_beyond_grow_by_a_quarter() -> None:
    times = StepTimes(CAPTURED, MOST)
    assert [times.size_for(rows) for rows in (1, 32, 33, 449, 513, 641, 9999)] == [
        32, 32, 64, 512, 640, 800, MOST,
    ]  # fmt: skip
    assert [StepTimes((), rows).size_for(rows) for rows in (1, 15, 16, 17)] == [1, 15, 16, 17]


def test_from_one_step_on_the_size_is_found_in_few_more() -> None:
    """Each tries what takes no longer, if a row takes no longer than it did."""
    times, rows = StepTimes(CAPTURED, MOST), 20
    for _ in range(8):
        times.observe(rows, False, seconds(rows))
        rows = times.rows_within(0.016)
        assert seconds(rows) <= 0.016
    assert rows == 512


def test_accidents_move_nothing() -> None:
    times, draw = learned(), Random(3)
    for _ in range(400):
        rows = draw.choice(CAPTURED)
        times.observe(rows, False, seconds(rows) + (0.3 if draw.random() < 0.2 else 0.0))
    assert times.rows_within(0.0145) >= 384


def test_a_size_whose_first_time_was_an_accident_is_tried_again() -> None:
    times = StepTimes(CAPTURED, MOST)
    times.observe(384, False, seconds(384))
    times.observe(512, False, 0.4)
    assert times.rows_within(0.016) == 512


def test_an_engine_that_became_slower_is_seen() -> None:
    times = learned()
    for _ in range(9):
        for rows in CAPTURED:
            times.observe(rows, False, 2 * seconds(rows))
    assert times.rows_within(0.015) == 128


def test_what_decoding_takes_is_guessed_from_steps_with_prompts_until_it_is_known() -> None:
    times = StepTimes(CAPTURED, MOST)
    times.observe(100, False, 0.007)
    assert times.decode(100) == times.decode(60) == 0.007
    times.observe(100, True, 0.006)
    assert times.decode(100) == 0.006


loads = st.builds(Load, st.integers(1, 256), st.integers(0, 256), st.integers(0, 100_000))


@pytest.mark.parametrize("bound_s", [None, 0.016, 0.001])
def test_an_idle_engine_takes_all(bound_s: float | None) -> None:
    assert Pace(learned(), MOST, bound_s).most_tokens(Load(0, 3, 2000)) == MOST


@given(load=loads)
def test_without_a_bound_all_is_taken(load: Load) -> None:
    assert Pace(learned(), MOST, math.inf).most_tokens(load) == MOST


@given(load=loads, bound_s=st.sampled_from([None, 0.001, 0.008, 0.016, 0.05]))
def test_steps_keep_to_their_bound(load: Load, bound_s: float | None) -> None:
    """But for the least that prompts get, and what is too much for it, in more than some steps."""
    rows = Pace(learned(), MOST, bound_s).most_tokens(load)
    decode_s = seconds(rows_in(load.decoding), decode=True)
    bound = bound_s or BOUND_STEPS * decode_s
    least = load.decoding + LEAST_TOKENS
    assert rows >= least
    crowd = load.prompts >= max(CROWD, load.decoding)
    needed = load.decoding + load.prompt_tokens / (1 if crowd else CROWD_STEPS)
    assert (
        seconds(rows) <= bound
        or rows == learned().size_for(least)
        or (rows <= learned().size_for(math.ceil(needed)) and seconds(rows) <= CROWD_BOUNDS * bound)
    )


def rows_in(rows: int) -> int:
    return learned().size_for(rows)


@given(st.lists(loads, max_size=20))
def test_captured_sizes_are_filled(met: list[Load]) -> None:
    pace = Pace(learned(), MOST, None)
    assert all(learned().size_for(rows) == rows for rows in map(pace.most_tokens, met))


def test_few_prompts_get_what_decoding_leaves_and_more_get_more() -> None:
    pace = Pace(learned(), MOST, 0.016)
    rows = [pace.most_tokens(Load(30, 3, tokens)) for tokens in (40, 500, 800, 1200, 2000, 5000, 9000)]
    assert rows[0] == learned().rows_within(QUIET_STEPS * seconds(32, decode=True)) == 128
    assert all(fewer <= more for fewer, more in pairwise(rows))
    assert rows[3] == learned().size_for(30 + 1200 // SPREAD_STEPS)
    assert rows[4] == rows[5] == 512
    assert rows[6] == learned().size_for(30 + 9000 // CROWD_STEPS)


def test_no_step_is_longer_than_the_one_that_does_most() -> None:
    """Captured, 512 rows take 14 ms here, and whatever is launched kernel by kernel 100 ms."""
    times = StepTimes(CAPTURED, MOST)
    for rows in (*CAPTURED, 640, 800, 1000, 4000, MOST):
        times.observe(rows, False, seconds(rows) if rows in CAPTURED else 0.1 + 0.00002 * rows)
    times.observe(256, True, 0.015)
    pace = Pace(times, MOST, None)
    assert pace.most_tokens(Load(200, 20, 6000)) == 512
    assert times.fastest(256, 1000, 200) == 512
    assert times.fastest(256, MOST, 200) == MOST, "it does 31,000 tokens a second, 512 rows 21,000"


def test_a_crowd_that_was_begun_is_done_before_steps_are_short_again() -> None:
    pace = Pace(learned(), MOST, 0.016)
    counts = [(1, 60), (31, 30), (50, 11), (53, 7), (40, 20)]
    rows = [pace.most_tokens(Load(decoding, prompts, 128 * prompts)) for decoding, prompts in counts]
    assert [row >= 128 * prompts for row, (_, prompts) in zip(rows, counts, strict=True)] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert rows[3:] == [384, 512]


def test_no_crowd_takes_longer_than_so_many_bounds() -> None:
    rows = Pace(learned(), MOST, 0.005).most_tokens(Load(2, 200, 100_000))
    assert seconds(rows) <= CROWD_BOUNDS * 0.005 < seconds(rows_in(rows + 1))
