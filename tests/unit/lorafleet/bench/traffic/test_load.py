"""Real traffic draws the same requests each time, and names no adapter that is not made."""

from collections import Counter

import pytest

from lorafleet.bench.errors import BenchError
from lorafleet.bench.traffic.load import ADAPTERS, Schedule, Traffic, rank_of
from lorafleet.bench.workload import Names

NAMES = Names(1000)


def test_lengths_ranks_and_popularity() -> None:
    requests = Traffic().requests(3000, 20.0, NAMES)
    prompts = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.max_new_tokens for request in requests]
    assert (min(prompts), max(prompts)) == (128, 1024) and (min(outputs), max(outputs)) == (64, 256)
    assert requests[-1].at == pytest.approx(3000 / 20, rel=0.1)
    counts = Counter(request.adapter for request in requests)
    assert counts.most_common(1)[0][0] == "bench-0000" and len(counts) > 400
    assert Counter(map(rank_of, range(ADAPTERS))) == {8: 600, 16: 300, 32: 100}


def test_the_first_requests_are_the_same_however_many_come_how_fast() -> None:
    traffic = Traffic(draws=50)
    few, many = traffic.requests(20, None, NAMES), traffic.requests(120, 3.0, NAMES)
    assert [(r.prompt_token_ids, r.max_new_tokens, r.adapter) for r in few] == [
        (r.prompt_token_ids, r.max_new_tokens, r.adapter) for r in many[:20]
    ]
    assert {request.at for request in few} == {0.0}
    adapters = [request.adapter for request in many]
    assert adapters[50:100] == adapters[:50], "drawn again"


def test_no_request_names_an_adapter_that_is_not_made() -> None:
    traffic = Traffic(draws=80)
    made = traffic.named()
    assert all(rank_of(number) == rank for rank, numbers in made.items() for number in numbers)
    named = {request.adapter for request in traffic.requests(500, None, NAMES)}
    assert named == {NAMES.adapter(number) for numbers in made.values() for number in numbers}


def test_a_try_out_has_short_ones() -> None:
    requests = Traffic().shrunk(64).requests(200, None, NAMES)
    assert {len(request.prompt_token_ids) for request in requests} <= set(range(2, 17))
    assert {request.max_new_tokens for request in requests} <= {1, 2, 3, 4}


def test_a_capacity_needs_more_requests_than_begin_and_end_together() -> None:
    with pytest.raises(BenchError, match="--capacity-requests 512 must be more than twice --under-way 256"):
        Schedule(capacity_requests=512)
    assert Schedule(capacity=3.0, capacity_requests=1).seconds_at(2.0) == 40.0
    for wrong in ({"at": (0.0,)}, {"capacity": -1.0}):
        with pytest.raises(BenchError, match="above 0"):
            Schedule(**wrong)  # type: ignore[arg-type]
