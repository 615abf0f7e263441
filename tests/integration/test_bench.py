"""`lorafleet bench` against real services, and against an engine alone, at a tiny scale."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lorafleet.cli import main as lorafleet
from tests.support.services.cluster import ROOT, Pair, wait_until

EXECUTOR = "--torch-threads 1 --max-loras 4 --max-lora-rank 8 --prefix-cache false --log-level warning"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, and a store with 32 adapters for it."""
    home = tmp_path_factory.mktemp("bench")
    assert lorafleet(["bench", "shapes", "tiny", str(home / "model")]) == 0
    made = ["--model", str(home / "model"), "--store", str(home / "store"), "--count", "32", "--rank", "4"]
    assert lorafleet(["bench", "make-adapters", *made]) == 0
    return home


def measured(
    home: Path, name: str, *arguments: str, executor: str = EXECUTOR, store: str = ""
) -> list[dict[str, Any]]:
    file = home / f"{name}.json"
    started = ["--model", str(home / "model"), "--store", store or str(home / "store")]
    started += ["--executor-args", executor]
    assert lorafleet(["bench", *arguments, *started, "--json", str(file), "--revision", "test"]) == 0
    results = json.loads(file.read_text())
    assert {"gpu", "torch", "triton", "git", "command"} <= results.keys()
    rows: list[dict[str, Any]] = results["rows"]
    return rows


def test_an_engine_alone_and_its_slots(home: Path) -> None:
    load = [
        "load",
        "--requests",
        "12",
        "--adapters",
        "12",
        "--popularity",
        "distinct",
        "--max-concurrency",
        "2",
    ]
    lengths = ["--prompt-tokens", "uniform:4:12", "--output-tokens", "6", "--warm-up", "0"]
    ready, row = measured(home, "engine", *load, *lengths, "--in-process")
    assert (ready["workload"], ready["unit"]) == ("start to ready", "s")
    assert (row["whole"], row["failed"], row["adapters_used"], row["slots"]) == (12, 0, 12, 4)
    assert (row["page_ins"], row["loads"], row["slot_hits"]) == (12, 12, 0)
    assert row["load_ms"] > 0
    assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(12 * 6, rel=0.01)
    for spread in (row["ttft_ms"], row["itl_ms"], row["tpot_ms"]):
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"]


def test_the_whole_product_beside_the_engine(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same preset both ways, and the two files compared."""
    rows = {
        name: measured(home, name, "preset", "d3", "--shrink", "32", f"--{name}")
        for name in ("local", "in-process")
    }
    for found in rows.values():
        assert [row["workload"] for row in found] == ["start to ready", "D3", "D3", "D3 x 8", "D3 x 8"]
        assert all(row["ours"] > 0 for row in found)
        assert all(row["failed"] == 0 and row["lengths_divided_by"] == 32 for row in found[1:])
        assert found[2]["base_ours"] == found[1]["ours"]
        assert found[4]["page_ins"] >= 4, "8 adapters, 4 slots"
    capsys.readouterr()
    assert (
        lorafleet(["bench", "compare", str(home / "local.json"), str(home / "in-process.json"), "--json"])
        == 0
    )
    assert [row["workload"] for row in json.loads(capsys.readouterr().out)].count("D3") == 2


def test_a_light_load_with_more_adapters_than_slots(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *rows = measured(home, "light", "preset", "no-cliff", "--shrink", "16", "--in-process")
    assert [row["adapters"] for row in rows] == [8, 12, 16, 32, 16, 32]
    assert all(row["failed"] == 0 and row["ours"] > 0 for row in rows)
    assert all(row["of_8_adapters"] > 0 for row in rows[1:])
    assert rows[3]["page_ins"] > 0 and rows[3]["page_in_ms"] > 0, "32 adapters, 4 slots"
    assert "with 32 adapters" in capsys.readouterr().out


def test_streams_beside_adapters_that_come_from_the_store_and_from_memory(home: Path) -> None:
    """Whatever was used before in the same call."""
    presets = ["preset", "page-in-stall", "page-in-stall", "--shrink", "16", "--in-process"]
    rows = measured(home, "stall", *presets, executor=f"{EXECUTOR} --max-loras 12 --max-seats 80")
    alone, cold, warm = rows[-3:]
    assert alone["adapters"] == 8 and cold["adapters"] == warm["adapters"] == 6
    assert (alone["loads"], warm["loads"]) == (0, 0)
    assert cold["loads"] >= cold["paged_in"] > 0 and warm["paged_in"] > 0
    assert cold["failed"] == warm["failed"] == 0
    # None where all had come before the last stream began.
    assert all(row["p99_ratio"] is None or row["p99_ratio"] > 0 for row in (cold, warm))


def test_streams_beside_a_store_that_is_slow(home: Path, tmp_path: Path) -> None:
    """As `results/slow-store-h200.json` is made, at a tiny scale: 100 kB/s, 30 kB an adapter."""
    command = [
        sys.executable,
        "-m",
        "tests.support.stores.slow_store",
        str(tmp_path / "redis"),
        "--port",
        "0",
    ]
    command += ["--slow-port", "0", "--megabytes-per-s", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as store:
        assert store.stdout
        fast, slow = (store.stdout.readline().split()[1] for _ in range(2))
        made = ["--model", str(home / "model"), "--count", "12", "--rank", "8"]
        assert lorafleet(["bench", "make-adapters", *made, "--store", fast]) == 0
        preset = ["preset", "slow-store", "--shrink", "32", "--in-process"]
        settings = f"{EXECUTOR} --max-loras 8 --max-model-len 512"
        _, alone, beside = measured(home, "slow", *preset, executor=settings, store=slow)
        store.terminate()
    assert alone["loads"] == 0 and 0 < beside["paged_in"] <= beside["loads"]
    assert alone["failed"] == beside["failed"] == 0 and beside["p99_ratio"] > 0


def test_first_tokens_of_adapters_beside_those_of_the_second_ones(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # At full length: on a fast machine short streams end before all six adapters had their turn.
    _, *rows = measured(home, "first", "preset", "first-use", "--in-process")
    workloads = [f"TTFT, first adapter of rank {rank}" for rank in (8, 16, 64)]
    assert [row["workload"] for row in rows[:4]] == ["TTFT, first requests of all", *workloads]
    assert all(row["ours"] > 0 and row["of_second"] > 0 for row in rows[:4])
    assert rows[4]["loads"] == 6 and rows[4]["failed"] == 0 and rows[4]["p99_ratio"] > 0
    assert "x the second's" in capsys.readouterr().out


def test_requests_without_an_adapter_beside_resident_ones(home: Path) -> None:
    _, *rows = measured(home, "base", "preset", "base-traffic", "--shrink", "200", "--in-process")
    assert [row["workload"] for row in rows] == [
        "32 x 8000 in, slots empty",
        "32 x 8000 in, 8 adapters resident",
    ]
    assert all(row["failed"] == 0 and row["ours"] > 0 for row in rows)
    assert all(row["adapters"] == row["slot_hits"] == row["page_ins"] == 0 for row in rows)


def test_open_load_on_a_running_scheduler(
    main: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures are counted by name, beside what was answered."""
    monkeypatch.setenv("LORAFLEET_TOKEN", "ops")
    file, trace = tmp_path / "load.json", tmp_path / "trace.jsonl"
    lines = [{"at": n / 50, "prompt_tokens": 8, "output_tokens": 4, "adapter": None} for n in range(6)]
    lines[3]["adapter"] = "nobody-knows-me"
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--target", main.scheduler.address, "--executor-metrics", main.executor.metrics_url]
    arguments += ["--trace", str(trace), "--json", str(file), "--vocab-size", "400", "--warm-up", "0"]
    assert lorafleet(["bench", "load", *arguments]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["requests"], row["whole"], row["errors"]) == (6, 5, {"ADAPTER_NOT_FOUND": 1})
    assert row["slots"] == 4
    assert row["ttft_ms"] and row["seconds"] >= 0.1


def test_an_adapter_that_is_missing_is_one_line_with_advice(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(home / "model"), "--store", str(home / "store"), "--executor-args", EXECUTOR]
    load = ["load", "--popularity", "one", "--adapters", "1", "--adapter-prefix", "none-"]
    assert lorafleet(["bench", *load, "--in-process", *arguments]) == 1
    assert "none-0000" in (error := capsys.readouterr().err.splitlines()[-1])
    assert "make-adapters" in error


def test_what_cannot_be_measured_or_kept_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = ["bench", "load", "--target", "127.0.0.1:9", "--requests", "2"]
    for arguments, said in [
        (nobody, "cannot reach a scheduler at 127.0.0.1:9"),
        ([*nobody, "--json", str(tmp_path / "none" / "x.json")], f"there is no folder {tmp_path / 'none'}"),
    ]:
        assert lorafleet(arguments) == 1
        out, err = capsys.readouterr()
        assert not out and err.startswith(f"error: {said}") and err.count("\n") == 1


def interrupted(home: Path, *work: str, rows: int, told: str = "") -> tuple[str, list[dict[str, Any]]]:
    """What a bench prints and writes that is interrupted half a second after it has written so many rows and
    told of its progress, which it does every few seconds: `told` is a pattern."""
    file = home / f"interrupted-{work[0]}.json"

    def written() -> list[dict[str, Any]]:
        with suppress(FileNotFoundError, json.JSONDecodeError):  # not yet, or just being written
            return list(json.loads(file.read_text())["rows"])
        return []

    bench = [sys.executable, "-m", "lorafleet", "bench", *work, "--in-process", "--json", str(file)]
    system = ["--model", str(home / "model"), "--store", str(home / "store"), "--executor-args", EXECUTOR]
    with (home / "interrupted.log").open("w+") as log:
        process = subprocess.Popen(
            [*bench, *system], stdout=subprocess.PIPE, stderr=log, cwd=ROOT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        wait_until(lambda: len(written()) >= rows, "it has written them")
        progress = home / "interrupted.log"
        wait_until(lambda: re.search(told, progress.read_text()), "it has told of it")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    return out, written()


def test_an_interrupt_tells_what_was_measured(home: Path) -> None:
    load = ["load", "--requests", "400", "--rate", "20", "--output-tokens", "4", "--warm-up", "0"]
    out, rows = interrupted(home, *load, rows=1, told=r"load: [1-9]\d* of 400")
    assert "throughput" in out
    assert rows[-1]["workload"] == "load, interrupted"
    assert 0 < rows[-1]["whole"] < 400


def test_an_interrupt_leaves_what_a_measurement_has_so_far(home: Path) -> None:
    _, rows = interrupted(home, "preset", "no-cliff", "--shrink", "2", rows=2)
    assert rows[1]["workload"] == "TTFT p50, 8 requests/s"
    assert "interrupted" in rows[-1]["workload"]


def test_real_traffic_and_what_the_engine_did_in_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["--model", str(home / "model"), "--store", str(tmp_path / "store")]
    assert lorafleet(["bench", "make-adapters", *made, "--real-traffic", "--draws", "20"]) == 0
    preset = ["preset", "real-traffic", "--local", "--shrink", "16", "--draws", "20", "--pause-ms", "1"]
    preset += ["--step-trace", str(tmp_path / "steps"), "--at", "2", "--overload-seconds", "0.3"]
    preset += ["--capacity-requests", "40", "--under-way", "8"]
    settings = f"{EXECUTOR} --max-lora-rank 32 --max-seats 8"
    _, capacity, heavy = measured(home, "traffic", *preset, executor=settings, store=str(tmp_path / "store"))
    assert capacity["ours"] > 0 and capacity["whole"] == 40 and capacity["unit"] == "requests/s"
    assert heavy["offered_requests_per_s"] == pytest.approx(capacity["ours"] * 2, rel=0.01)
    for row in (capacity, heavy):
        assert row["failed"] == row["wrong_length"] == 0
        assert row["steps"]["count"] == sum(of["count"] for of in row["steps"]["by_rows"].values()) > 0
        assert row["steps"]["page_ins"] <= row["page_ins"], "what landed in time"
        assert sum(of["count"] for of in row["crowds"].values() if of) == row["requests"]
        assert row["pause_moments"] >= len(row["pauses"]) > 0
        assert any(pause["steps"] for pause in row["pauses"])
    assert "first token p50" in capsys.readouterr().out
