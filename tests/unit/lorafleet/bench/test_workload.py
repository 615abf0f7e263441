"""Requests from descriptions and traces: the distributions are what they say, and a seed draws the same."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from lorafleet.bench.arrivals import arrival_times
from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.popularity import choose
from lorafleet.bench.workload import Description, Names, generate, read_trace

NAMES = Names(vocab_size=500)
EIGHT = Lengths("fixed", 8)


def gaps(kind: str, **shape: float) -> list[float]:
    times = arrival_times(kind, 20_000, Random(1), rate=50, **shape)
    assert times[0] == 0
    assert times == sorted(times)
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("kind", "burstiness", "spread"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)]
)
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(
    kind: str, burstiness: float, spread: float
) -> None:
    found = gaps(kind, burstiness=burstiness)
    assert mean(found) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(found) / mean(found) == pytest.approx(spread, rel=0.07)


def test_at_once_needs_no_rate_and_the_others_do() -> None:
    assert arrival_times("at-once", 3, Random(0)) == [0.0, 0.0, 0.0]
    with pytest.raises(BenchError, match="rate"):
        arrival_times("poisson", 3, Random(0))
    with pytest.raises(BenchError, match="burstiness"):
        arrival_times("gamma", 3, Random(0), rate=1, burstiness=0)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("7", 7, 7), ("uniform:3:9", 3, 9), ("normal:20:4", 1, 60), ("normal:1:50", 1, 400)],
)
def test_lengths_stay_within_what_they_say(text: str, low: int, high: int) -> None:
    rng = Random(2)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    if text.startswith("uniform"):
        assert set(drawn) == set(range(low, high + 1))
    if text == "normal:20:4":
        assert (mean(drawn), pstdev(drawn)) == pytest.approx((20, 4), rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "uniform:9:3", "uniform:3", "normal:4", "poisson:3:1", "1:2"]
)
def test_a_wrong_length_is_named(text: str) -> None:
    with pytest.raises(BenchError, match="length"):
        Lengths.parse(text)


def test_popularities() -> None:
    assert choose("none", 3, 0, Random(0)) == [None, None, None]
    assert choose("one", 3, 5, Random(0)) == [0, 0, 0]
    assert choose("distinct", 5, 3, Random(0)) == [0, 1, 2, 0, 1]
    uniform = Counter(choose("uniform", 30_000, 3, Random(0)))
    assert all(count == pytest.approx(10_000, rel=0.05) for count in uniform.values())
    zipf = Counter(choose("zipf:2", 30_000, 3, Random(0)))
    whole = 1 + 1 / 4 + 1 / 9
    for number in range(3):
        assert zipf[number] == pytest.approx(30_000 / (number + 1) ** 2 / whole, rel=0.08)


@pytest.mark.parametrize(("popularity", "adapters"), [("often", 3), ("zipf:x", 3), ("one", 0)])
def test_a_wrong_popularity_is_named(popularity: str, adapters: int) -> None:
    with pytest.raises(BenchError, match=r"popularity|zipf"):
        choose(popularity, 2, adapters, Random(0))


def test_a_seed_draws_the_same_and_one_change_leaves_the_rest() -> None:
    description = Description(20, EIGHT, Lengths("uniform", 1, 9), "uniform", 4, arrivals="poisson", rate=5)
    first = generate(description, NAMES, 3)
    assert generate(description, NAMES, 3) == first != generate(description, NAMES, 4)
    zipf = generate(
        Description(20, EIGHT, Lengths("uniform", 1, 9), "zipf", 4, arrivals="poisson", rate=5), NAMES, 3
    )
    assert [(r.at, r.prompt_token_ids, r.max_new_tokens) for r in zipf] == [
        (r.at, r.prompt_token_ids, r.max_new_tokens) for r in first
    ]
    assert {r.adapter for r in first} == {f"bench-{n:04d}" for n in range(4)}
    assert all(16 <= token < 500 for r in first for token in r.prompt_token_ids)


def test_adapters_can_begin_elsewhere() -> None:
    shifted = generate(Description(2, EIGHT, EIGHT, "distinct", 2, first_adapter=8), NAMES, 0)
    assert [r.adapter for r in shifted] == ["bench-0008", "bench-0009"]


def test_a_trace_is_played_from_its_first_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"at": 12.5, "prompt_tokens": 3, "output_tokens": 2, "adapter": "acme/x@latest"}\n\n'
        '{"at": 10, "prompt_tokens": 5, "output_tokens": 1, "adapter": 7}\n'
        '{"at": 11, "prompt_tokens": 4, "output_tokens": 9}\n'
    )
    requests = read_trace(file, NAMES, 0)
    assert [(r.at, len(r.prompt_token_ids), r.max_new_tokens, r.adapter) for r in requests] == [
        (0, 5, 1, "bench-0007"),
        (1, 4, 9, None),
        (2.5, 3, 2, "acme/x@latest"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"at": 1, "prompt_tokens": 0, "output_tokens": 1}',
        '{"at": -1, "prompt_tokens": 1, "output_tokens": 1}',
        '{"prompt_tokens": 1, "output_tokens": 1}',
        '{"at": 1, "prompt_tokens": 1, "output_tokens": 1, "adapter": []}',
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(BenchError, match=r"trace\.jsonl:2"):
        read_trace(file, NAMES, 0)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(BenchError, match="no requests"):
        read_trace(tmp_path / "empty", NAMES, 0)
