"""`lorafleet usage` as a user runs it, over a folder and a real Redis."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from adapter_store.redis_store.usage_streams import UsageStreams
from lorafleet.cli import main
from lorafleet.usage.record import encode
from tests.support.ledger import NOON, record
from tests.support.stores.redis_server import RedisServer

DAY = 86400
RECORDS = [
    record(1),
    record(2, outcome="STOP", output=7, cached=0),
    record(3, tenant="bcme", adapter="", digest="", output=1),
    record(4, outcome="CANCELLED", output=3),
    record(5, time=NOON - 3 * DAY),
    # Taken up again on another scheduler, on the next day.
    record(6, time=NOON - DAY, outcome="CANCELLED", output=4),
    record(6, part=1, resumed=4, output=9),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for day, scheduler, at in (("27", "a", -3), ("29", "a", -1), ("30", "b", 0)):
        lines = [encode(each) for each in RECORDS if each.time == NOON + at * DAY]
        (tmp_path / f"usage-2026-11-{day}-{scheduler * 12}-000001.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "notes.jsonl").write_text("{}")
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["usage", "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_sums_by_tenant_adapter_and_outcome(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ever in ("0001-01-01", "0999-01-01"):
        assert report(capsys, "--ledger-dir", str(folder), "--since", ever)["rows"]
    found = report(capsys, "--ledger-dir", str(folder), "--since", "2026-11-30")
    rows = {(row["tenant"], row["adapter"], row["outcome"]): row for row in found["rows"]}
    assert rows.keys() == {
        ("acme", "acme/support", "LENGTH"),
        ("acme", "acme/support", "STOP"),
        ("bcme", "", "LENGTH"),
    }
    assert rows["acme", "acme/support", "LENGTH"] == {
        "tenant": "acme",
        "adapter": "acme/support",
        "outcome": "LENGTH",
        "answers": 2,
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "output_tokens": 14,
        "repeated_tokens": 0,
    }
    [unseen] = found["ends_that_nobody_saw"]
    assert (unseen["outcome"], unseen["answers"], unseen["output_tokens"]) == ("CANCELLED", 1, 3)


def test_times_and_days(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--ledger-dir", str(folder), "--by", "day")
    rows = report(capsys, *arguments)["rows"]
    days = {row["day"]: row["answers"] for row in rows if row["outcome"] == "LENGTH"}
    assert days == {"2026-11-27": 1, "2026-11-30": 3}
    until = report(capsys, *arguments, "--until", "2026-11-30T11:59:59")
    assert [row["day"] for row in until["rows"]] == ["2026-11-27"]


def test_csv_and_text_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--ledger-dir", str(folder), "--by", "tenant", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(int(row["output_tokens"]) for row in rows if row["end_seen"] == "true") == 27
    assert main(["usage", "--ledger-dir", str(folder), "--by", "tenant"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == [
        "tenant", "outcome", "answers", "prompt", "cached", "output", "repeated",
    ]  # fmt: skip
    assert text.splitlines()[4].split() == ["all", "5", "100", "64", "27", "0"]
    assert "ends that nobody saw" in text


def test_what_is_in_redis_too_counts_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        streams = UsageStreams.open(server.url)
        lines = [encode(each) for each in RECORDS]
        streams.append("2026-11-30", lines * 2, 0)
        streams.append("2026-11-20", lines, 0)
        both = report(capsys, "--ledger-dir", str(folder), "--store", server.url)
        assert both == report(capsys, "--ledger-dir", str(folder))
        assert both == report(capsys, "--store", server.url)
        assert report(capsys, "--store", server.url, "--since", "2026-12-05")["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to read"),
        (("--ledger-dir", "/nowhere/at/all"), "no folder"),
        (("--store", "disk:/store"), "--store"),
    ],
)
def test_what_cannot_be_read_is_named(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--by", "colour"), ("--by", "day,day"), ("--since", "yesterday")])
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["usage", *arguments])
    assert ended.value.code == 2
