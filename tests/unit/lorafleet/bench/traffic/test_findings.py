"""What is found in records of streams and in a trace of steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorafleet.bench.errors import BenchError
from lorafleet.bench.requests import Record, Request
from lorafleet.bench.traffic.crowds import FIRST, STREAMING, USED, crowds, delays
from lorafleet.bench.traffic.measure import capacity_of
from lorafleet.bench.traffic.pauses import Pause, find_pauses, pause_row
from lorafleet.bench.traffic.step_lines import StepLines, steps_row


def record(sent: float, *times: float, adapter: str = "a", error: str = "") -> Record:
    ended = times[-1] if times else sent + 0.5
    return Record("all", Request(0.0, (1,), 8, adapter), sent, sent, [(at, 1) for at in times], ended, error)


def step(number: int, at: float, ms: float, rows: int = 64, **fields: Any) -> dict[str, Any]:
    line = {"step": number, "at": at, "landed": at + ms / 1e3, "ms": ms, "rows": rows, "captured": rows}
    return line | {"page_ins": 0, "preempted": 0, "host_ms": {"plan": 1.0, "wait": ms - 1}} | fields


def test_a_capacity_leaves_out_the_beginning_and_the_end() -> None:
    """Four under way: at 1 s they end together, then one a quarter of a second, and at last the rest."""
    sent = [0.0, 0.0, 0.0, 0.0, *(1.0 + 0.25 * number for number in range(12))]
    ends = [1.0, 1.0, 1.0, 1.0, *(1.25 + 0.25 * number for number in range(12))]
    records = [record(*pair) for pair in zip(sent, ends, strict=True)]
    assert capacity_of(records, 4) == pytest.approx(4.0)
    with pytest.raises(BenchError, match=r"too few answers to tell a capacity: 3 of 4, \['QUEUE_FULL'\]"):
        capacity_of([*records[:3], record(0.0, error="QUEUE_FULL")], 4)


def test_gaps_of_several_streams_at_once_are_one_pause() -> None:
    records = [
        record(0.0, 0.9, 1.0, 1.3, 1.31),
        record(0.0, 1.05, 1.29, 1.3),
        record(0.0, 3.0, 3.2),
        record(0.0, 0.5),
    ]
    first, second = find_pauses(records, 0.1)
    assert (first.start, first.end, first.streams, round(first.longest, 3)) == (1.0, 1.3, 2, 0.3)
    assert (second.start, second.end, second.streams) == (3.0, 3.2, 1)


def test_a_pause_says_what_the_engine_did() -> None:
    steps = [
        step(1, 10.0, 8.0),
        step(2, 10.008, 290.0, rows=4000, captured=0, gc_ms=3.0, device_ms=100.0),
        step(3, 10.298, 9.0),
        step(4, 10.4, 9.0),
    ]
    row = pause_row(Pause(10.004, 10.3, 0.296, 21), 10.0, steps)
    assert (row["ms"], row["streams"], row["steps"]) == (296, 21, 3)
    assert row["host_ms"] == {"wait": 304, "plan": 3} and row["device_ms"] == 100 and row["gc_ms"] == 3
    assert [one["step"] for one in row["longest_steps"]] == [2, 3]
    assert row["longest_steps"][0]["rows"] == 4000
    assert pause_row(Pause(10.004, 10.3, 0.296, 21), 10.0, []).keys() == {
        "at_s",
        "ms",
        "from_first_to_last_ms",
        "streams",
    }


def test_steps_are_counted_by_size_and_duration() -> None:
    steps = [step(1, 0, 4.0), step(2, 1, 6.0, device_ms=3.0), step(3, 2, 130.0, rows=9000, captured=0)]
    row = steps_row(steps)
    assert (row["count"], row["captured"]) == (3, 2)
    assert row["by_rows"]["to 64 rows"] == {
        "count": 2,
        "captured": 2,
        "ms": {"p50": 5, "p99": 5.98, "max": 6},
        "to 5 ms": 1,
        "to 10 ms": 1,
        "device_share": 0.3,
    }
    assert row["by_rows"]["over 8192 rows"]["over 100 ms"] == 1


def test_a_trace_is_read_while_it_grows(tmp_path: Path) -> None:
    file, lines = tmp_path / "steps", [json.dumps(step(number, number, 10.0)) for number in range(4)]
    file.write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])
    trace = StepLines(file)
    assert [one["step"] for one in trace.between(0.0, 9.0)] == [0, 1], "the third is being written"
    file.write_text("\n".join(lines) + "\n")
    assert [one["step"] for one in trace.between(1.0, 3.0)] == [1, 2]
    assert [one["step"] for one in trace.between(3.0, 9.0)] == [3]
    file.write_text("\n".join(lines) + "\nno step\n")
    with pytest.raises(BenchError, match="is no trace of steps"):
        trace.between(3.0, 9.0)


def test_first_tokens_by_what_the_adapter_did() -> None:
    records = [
        record(0.0, 0.1, 2.0, adapter="a"),
        record(0.05, 0.25, adapter="a"),
        record(1.0, 1.1, 1.2, adapter="a"),
        record(1.0, 2.0, adapter="b"),
        record(2.5, 2.8, adapter="a"),
        record(2.5, adapter="b", error="QUEUE_FULL"),
    ]
    row = crowds(records, used={"b"})
    assert {name: of["count"] for name, of in row.items()} == {STREAMING: 1, USED: 3, FIRST: 1}
    assert row[STREAMING]["max"] == 100 and row[FIRST]["max"] == 100 and row[USED]["max"] == 1000
    assert crowds([], ())[FIRST] is None


def test_failures_say_when_to_come_again() -> None:
    full = [record(0.0, error="QUEUE_FULL") for _ in range(3)]
    full[0].retry_after, full[1].retry_after = 2.0, 4.0
    row = delays([*full, record(0.0, 1.0)])
    assert row == {
        "QUEUE_FULL": {
            "count": 3,
            "after_ms": {"p50": 500, "max": 500},
            "without_retry_delay": 1,
            "retry_after_s": {"least": 2.0, "p50": 3.0, "most": 4.0},
        }
    }
