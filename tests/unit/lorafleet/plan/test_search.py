import math

import pytest

from lorafleet.plan.search import Fleet, Goals, Outcome, Room, Search

GB = 10**9
ROOM = Room(64, (8, 16, 32, 64), (GB, 2 * GB, 4 * GB, 8 * GB))


def search(least: int, slots: int = 1, host: int = 0, room: Room = ROOM) -> Search:
    """A world in which `least` executors of enough slots and host memory meet the goals, and with fewer slots
    as many times more."""

    def run(fleet: Fleet) -> Outcome:
        wanted = least * max(1, math.ceil(slots / fleet.slots))
        good = fleet.executors >= wanted and fleet.host_bytes >= host
        return Outcome(0.1, 0.4 if good else 3.0 * wanted / fleet.executors, 40.0, 900.0, 0.1)

    return Search(Goals(0.5), room, run)


@pytest.mark.parametrize("least", [1, 2, 3, 5, 8, 13, 64])
def test_the_least_number_of_executors_is_found(least: int) -> None:
    one = search(least)
    assert one.find() == Fleet(least, 8, GB)
    assert len(one.tried) <= 2 * math.log2(64) + 2 + 4


@pytest.mark.parametrize(("slots", "expected"), [(8, 8), (9, 16), (33, 64), (64, 64)])
def test_of_the_fewest_executors_the_fewest_slots(slots: int, expected: int) -> None:
    assert search(3, slots).find() == Fleet(3, expected, GB)


@pytest.mark.parametrize(("host", "expected"), [(0, GB), (GB + 1, 2 * GB), (5 * GB, 8 * GB)])
def test_then_the_least_host_memory(host: int, expected: int) -> None:
    assert search(2, 16, host).find() == Fleet(2, 16, expected)


def test_goals_out_of_reach_are_said_to_be() -> None:
    one = search(65)
    assert one.find() is None and one.best is None
    one.around()
    assert max(fleet.executors for fleet in one.tried) == 64


def test_more_executors_are_not_tried_where_they_do_not_help() -> None:
    def run(fleet: Fleet) -> Outcome:
        return Outcome(0.1, max(0.8, 4.0 / fleet.executors), 40.0, 900.0, 0.1)

    one = Search(Goals(0.5), ROOM, run)
    assert one.find() is None and one.is_flat
    assert [fleet.executors for fleet in one.tried] == [1, 2, 4, 8, 16]


def test_more_executors_are_tried_while_streams_get_faster() -> None:
    def run(fleet: Fleet) -> Outcome:
        return Outcome(0.1, 0.2, 10.0 * fleet.executors, 900.0, 0.1)

    one = Search(Goals(0.5, stream_tokens_s=50.0), ROOM, run)
    assert one.find() == Fleet(5, 8, GB) and not one.is_flat


def test_what_is_beside_the_best_is_tried_once_each() -> None:
    one = search(3, 16, 2 * GB)
    best = one.find()
    assert best == Fleet(3, 16, 2 * GB)
    one.around()
    assert {Fleet(n, 16, 2 * GB) for n in (2, 3, 4, 5)} <= one.tried.keys()
    assert {Fleet(3, 8, 2 * GB), Fleet(3, 32, 2 * GB), Fleet(4, 8, 2 * GB)} <= one.tried.keys()
    assert {Fleet(3, 16, room) for room in (GB, 4 * GB)} <= one.tried.keys()


def test_what_stands_when_it_is_cut_short_is_the_best_so_far() -> None:
    one = search(2, 16)
    inner, calls = one.run, []

    def run(fleet: Fleet) -> Outcome:
        calls.append(fleet)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return inner(fleet)

    one.run = run
    with pytest.raises(KeyboardInterrupt):
        one.find()
    assert one.best and one.meets(one.best)


def test_each_goal_counts() -> None:
    outcome = Outcome(0.1, 0.5, 30.0, 900.0, 0.1, failed=0.01)
    assert Goals(0.5, 30.0, 0.01).met_by(outcome)
    for goals in (Goals(0.49, 30.0, 0.01), Goals(0.5, 30.1, 0.01), Goals(0.5, 30.0, 0.0)):
        assert not goals.met_by(outcome)
