"""Places on virtual time: few more than there are, and who comes again when told finds one."""

from heapq import heapify, heappop, heappush
from random import Random

import pytest

from lorafleet.doors.places import BEYOND, MOST_KEPT, MOST_OF_ONE, Line, Places


def test_a_place_is_kept_for_who_was_told_and_not_for_ever() -> None:
    places = Places()
    for at in (0.0, 1.0, 2.0, 3.0):
        places.ended(1, at)
    wait_s = places.ask(2, 2, 4.0, "first")
    assert wait_s is not None and wait_s > 1.0  # Each lasts for a second.
    assert places.ask(2, 2, 4.5, "first") == pytest.approx(wait_s - 0.5)
    assert places.ask(2, 2, 4.0 + wait_s, "another") is not None
    assert places.ask(2, 2, 4.0 + wait_s, "first") is None
    places.taken("first", 4.0 + wait_s)
    assert places.ask(2, 2, 4.0 + wait_s, "first") is not None
    assert places.ask(2, 2, 1000.0, "another") is not None  # It is too late.


@pytest.mark.parametrize("most", [4, 100])
def test_those_who_do_not_come_again_leave_no_place_empty(most: int) -> None:
    rng, places, held, served, now = Random(most), Places(), 0, 0, 0.0
    ends: list[float] = []
    for number in range(180 * most):
        now += rng.expovariate(3 * most)
        while ends and ends[0] <= now:
            places.ended(held, heappop(ends))
            held -= 1
        if places.ask(held, most, now, str(number)) is None:
            held, served = held + 1, served + 1
            heappush(ends, now + rng.expovariate(1.0))
    assert served > 0.7 * most * now


@pytest.mark.parametrize("load", [1.5, 10.0])
@pytest.mark.parametrize("most", [1, 8, 100])
def test_one_retry_after_the_told_delay_finds_a_place(load: float, most: int) -> None:
    """Answers last for 1 s on average, some much longer; ever more come than there are places."""
    rng, places = Random(f"{load} {most}"), Places()
    events: list[tuple[float, str, str]] = []
    at = 0.0
    for number in range(200 + 20 * most):
        at += rng.expovariate(load * most)
        heappush(events, (at, f"r{number}", "new"))
    held, came, succeeded = 0, 0, 0
    while events:
        now, key, what = heappop(events)
        if what == "end":
            places.ended(held, now)
            held -= 1
            continue
        wait_s = places.ask(held, most, now, key)
        if what == "again":
            came, succeeded = came + 1, succeeded + (wait_s is None)
        if wait_s is None:
            places.taken(key, now)
            held += 1
            heappush(events, (now + rng.expovariate(1.0), key, "end"))
        elif what == "new":
            heappush(events, (now + wait_s + rng.uniform(0, 0.1), key, "again"))
        assert held <= max(most + 1, BEYOND * most)
    assert came >= 50 and succeeded >= 0.95 * came


@pytest.mark.parametrize("key", ["mine", ""])
def test_who_comes_too_early_over_and_over_takes_no_more_memory(key: str) -> None:
    places = Places(MOST_OF_ONE)
    for number in range(20_000):
        now = number / 100
        wait_s = places.wait_s(2, 2, now, key, "a")
        if wait_s is not None:
            places.keep(key, now, wait_s, "a")
    promises = places._promises
    assert len(promises) <= MOST_OF_ONE
    assert max(len(promises._ends), len(promises._dues)) <= 2 * MOST_OF_ONE


def test_callers_of_whom_nobody_is_to_come_again_any_more_are_forgotten() -> None:
    line = Line()
    for number in range(3 * MOST_KEPT):
        now = float(number)
        assert line.of(f"c{number}", now).ask(2, 2, now, "mine") is not None
    assert len(line._places) <= MOST_KEPT


@pytest.mark.parametrize("hammering", [3, 8])
def test_callers_who_are_told_more_than_can_be_kept_leave_some_of_it_to_others(hammering: int) -> None:
    """They come once, each call by a name of its own, and fill all lines that there are within seconds."""
    rng, places, held, came, succeeded, number = Random(hammering), Places(MOST_OF_ONE), 0, 0, 0, 0
    events: list[tuple[float, str, str]] = []
    for seconds in range(20):
        for caller, calls in (*((f"hog{hog}", 400) for hog in range(hammering)), ("honest", 5)):
            number += calls
            events += [(seconds + rng.random(), f"{caller} {number - call}", "new") for call in range(calls)]
    heapify(events)
    while events:
        now, name, what = heappop(events)
        if what == "end":
            places.ended(held, now)
            held -= 1
            continue
        caller, key = name.split()
        wait_s = places.wait_s(held, 64, now, key, caller)
        if what == "again":
            came, succeeded = came + 1, succeeded + (wait_s is None)
        if wait_s is None:
            places.taken(key, now, caller)
            held += 1
            heappush(events, (now + rng.expovariate(1.0), name, "end"))
        else:
            places.keep(key, now, wait_s, caller)
            if caller == "honest" and what == "new":
                heappush(events, (now + wait_s + rng.uniform(0, 0.05), name, "again"))
    assert came >= 50 and succeeded >= 0.95 * came
