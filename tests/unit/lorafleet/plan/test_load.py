import json
from collections import Counter
from pathlib import Path

import pytest

from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.workload import Description as BenchDescription
from lorafleet.bench.workload import Names, generate
from lorafleet.plan.load import Description, Load, Ranks, described, traced

RANKS = Ranks.parse("8:60,16:30,32:10")
LENGTHS = Lengths.parse("uniform:16:64"), Lengths.parse("8")


def one(seed: int = 3, adapters: int = 100, popularity: str = "zipf:1") -> Load:
    return described(Description(10.0, 50.0, *LENGTHS, popularity, adapters, RANKS), seed)


def test_it_is_the_load_that_bench_sends() -> None:
    bench = BenchDescription(500, *LENGTHS, "zipf:1", 100, arrivals="gamma", rate=10.0)
    sent, load = generate(bench, Names(64, ""), 3), one()
    assert [(a.at, a.prompt_tokens, a.output_tokens, a.adapter) for a in load.arrivals] == [
        (r.at, len(r.prompt_token_ids), r.max_new_tokens, r.adapter) for r in sent
    ]
    assert one() == load != one(seed=4)
    assert load.ranks.keys() == {arrival.adapter for arrival in load.arrivals}


def test_ranks_have_their_shares_among_the_popular_ones_too() -> None:
    for count in (50, 1000):
        found = Counter(RANKS.of(f"{number}" for number in range(count)).values())
        assert [found[rank] / count for rank in (8, 16, 32)] == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    assert set(Ranks.parse("64").of("abc").values()) == {64}


@pytest.mark.parametrize("text", ["", "x", "8:", "8:1,16", "0", "513", "8:0", "8:-1,16:2", "8:inf"])
def test_wrong_ranks_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="ranks"):
        Ranks.parse(text)


def test_a_trace_begins_at_0_and_names_what_it_likes(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    lines = [
        {"at": 7.5, "prompt_tokens": 5, "output_tokens": 2, "adapter": "acme/b"},
        {"at": 5, "prompt_tokens": 3, "output_tokens": 1, "adapter": 4},
        {"at": 6, "prompt_tokens": 4, "output_tokens": 1},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    load = traced(file, Ranks.parse("16"))
    assert [(a.at, a.adapter) for a in load.arrivals] == [(0.0, "0004"), (1.0, None), (2.5, "acme/b")]
    assert load.ranks == {"0004": 16, "acme/b": 16} and (load.seconds, load.max_rank) == (2.5, 16)
    file.write_text("\n")
    with pytest.raises(BenchError, match="has no requests"):
        traced(file, RANKS)
    file.write_text('{"at": 1, "prompt_tokens": 0, "output_tokens": 1}')
    with pytest.raises(BenchError, match=r"day.jsonl:1: prompt_tokens is 0"):
        traced(file, RANKS)
