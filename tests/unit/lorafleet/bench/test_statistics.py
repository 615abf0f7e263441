"""Records to figures, executors' expositions to slot use, and both to rows."""

import pytest

from lorafleet.bench.compare import compare
from lorafleet.bench.render import load_table, rows_table
from lorafleet.bench.requests import Record, Recording, Request
from lorafleet.bench.rows import (
    OUTPUT,
    PER_TOKEN,
    details,
    make_row,
    peer_figures,
    rounded,
    value_of,
    with_bases,
)
from lorafleet.bench.slot_use import read_totals, slot_use
from lorafleet.bench.statistics import percentile, summarize


def record(sent: float, *pieces: tuple[float, int], adapter: str | None = None, error: str = "") -> Record:
    request = Request(0.0, (1, 2, 3), 8, adapter)
    ended = pieces[-1][0] if pieces else sent
    return Record("all", request, sent - 0.25, sent, list(pieces), ended, error)


def test_a_summary_counts_what_came() -> None:
    recording = Recording(
        [
            record(10.0, (10.5, 1), (10.7, 1), (11.1, 2), adapter="a"),
            record(11.0, (12.0, 1), adapter="b"),
            record(11.0, error="QUEUE_FULL", adapter="a"),
        ]
    )
    summary = summarize(recording)
    assert (summary.requests, summary.whole, summary.failed) == (3, 2, 1)
    assert summary.errors == {"QUEUE_FULL": 1}
    assert (summary.seconds, summary.input_tokens, summary.output_tokens) == (2.0, 6, 5)
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (1.0, 2.5)
    assert (summary.adapters, summary.late_ms) == (2, 250.0)
    assert summary.ttft_ms and summary.ttft_ms.mean == pytest.approx(750)
    assert summary.itl_ms and (summary.itl_ms.p50, summary.itl_ms.mean) == pytest.approx((300, 300))
    assert summary.tpot_ms and summary.tpot_ms.p50 == pytest.approx(200), (
        "0.6 s for the 3 tokens after the first"
    )
    assert value_of(summary, PER_TOKEN) == summary.tpot_ms.p50


def test_nothing_answered_is_no_division_by_zero() -> None:
    summary = summarize(Recording([record(1.0, error="NO_EXECUTOR")]))
    assert (summary.output_tokens_per_s, summary.ttft_ms, value_of(summary, PER_TOKEN)) == (0.0, None, None)
    assert details(summary, None)["errors"] == {"NO_EXECUTOR": 1}
    assert summarize(Recording()).requests == 0


def test_percentiles_lie_between_their_neighbours() -> None:
    assert [percentile([1.0, 2.0, 4.0], point) for point in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert percentile([3.0], 99) == 3.0


def test_slot_use_is_the_growth_over_all_executors() -> None:
    text = (
        "# HELP lorafleet_executor_slots Slots in all.\n"
        "lorafleet_executor_slots 4.0\n"
        "lorafleet_executor_page_ins_total {0}.0\n"
        "lorafleet_executor_slot_hits_total 3.0\n"
        'lorafleet_executor_adapter_load_seconds_bucket{{le="0.1"}} 9.0\n'
        "lorafleet_executor_adapter_load_seconds_count {0}.0\n"
        "lorafleet_executor_adapter_load_seconds_sum {1}\n"
    )
    before, after = read_totals([text.format(2, 0.5)] * 2), read_totals([text.format(5, 0.8)] * 2)
    used = slot_use(before, after)
    assert used is not None
    assert (used.slots, used.page_ins, used.slot_hits, used.loads) == (8, 6, 0, 6)
    assert used.load_ms == pytest.approx(100)
    assert used.page_in_ms is None
    assert slot_use({}, {}) is None


def test_rows_stand_beside_the_peer_and_our_own_base() -> None:
    rows = with_bases(
        [
            make_row("D2 uniform, from disk", 128, 3300.0, OUTPUT, None),
            make_row("D1", 8, 6500.0, OUTPUT, None),
            make_row("D2", 0, 10300.0, OUTPUT, None),
            make_row("D1", 0, 7200.0, OUTPUT, None),
        ]
    )
    assert [row["base_ours"] for row in rows] == [10300.0, 7200.0, None, None]
    assert [(row["peer_default"], row["peer_best"]) for row in rows[:2]] == [(1330, None), (3694, 5140)]
    wanted = {"workload", "adapters", "slots", "ours", "unit", "peer_default", "peer_best", "base_ours"}
    assert all(wanted <= row.keys() for row in rows)


def test_every_figure_of_the_peer_has_its_preset() -> None:
    from lorafleet.bench.presets import PRESETS

    ours = {(c.workload, c.description.adapters, c.unit) for cases in PRESETS.values() for c in cases}
    theirs = {(row["workload"], row["adapters"], row["unit"]) for row in peer_figures()["rows"]}
    assert theirs - ours == {("start to ready", 0, "s")}


def test_tables_tell_what_failed_and_what_was_compared() -> None:
    summary = summarize(Recording([record(1.0, (1.5, 1)), record(1.0, error="NO_EXECUTOR")]))
    row = make_row("D3", 1, 6.8, PER_TOKEN, None) | details(summary, None)
    text = rows_table([row | {"median_ratio": 1.02, "p99_ratio": 1.4, "paged_in": 100}])
    assert "1.16x" in text, "7.9 ms a token, the peer's best, over ours"
    assert "median 1.02x that of the streams alone, p99 1.4x, 100 adapters paged in" in text
    assert "failed in D3, 1 adapters: 1 x NO_EXECUTOR" in text
    assert "1 of 2 whole, 1 failed" in load_table(row)


def test_two_files_are_compared_where_both_have_a_row() -> None:
    product, engine = make_row("D1", 0, 97.0, OUTPUT, None), make_row("D1", 0, 100.0, OUTPUT, None)
    assert [row["ratio"] for row in compare([product, make_row("D3", 0, 1.0, OUTPUT, None)], [engine])] == [
        0.97
    ]


def test_rounding_keeps_what_a_measurement_is_worth() -> None:
    assert [rounded(v) for v in (None, 12, 1.23456, 0.00123456, 123456.7)] == [
        None,
        12,
        1.235,
        0.001235,
        123457.0,
    ]
