import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorafleet.bench.lengths import Lengths
from scheduler.simulate.__main__ import main
from scheduler.simulate.baselines import POLICIES
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.picture import draw
from scheduler.simulate.report import table
from scheduler.simulate.requests import End
from scheduler.simulate.run import Row, play, worst
from scheduler.simulate.scenario import ALL_RESIDENT, Change, Scenario
from scheduler.simulate.scenarios import SCENARIOS
from scheduler.simulate.traffic import Sessions, Traffic

SMALL = Scenario(
    "small",
    "More adapters than slots.",
    executors=3,
    adapters=24,
    executor=ExecutorSettings(seats=8, slots=4, host_bytes=3_000_000_000),
    traffic=Traffic(30.0, prompt=Lengths("uniform", 16, 300), output=Lengths("uniform", 1, 60)),
    seconds=6.0,
    warm_s=1.0,
)
ROW = {
    "scenario", "policy", "executors", "adapters", "slots", "rate", "seed",
    "ttft_p50_s", "ttft_p99_s", "tokens_s", "page_ins_per_request",
}  # fmt: skip


@pytest.mark.parametrize("policy", [*POLICIES, ALL_RESIDENT])
def test_every_request_is_answered_whole(policy: str) -> None:
    played = play(SMALL, policy)
    played.scheduler.check()
    for record in played.scheduler.records:
        assert record.end is End.ANSWERED and record.tokens == record.asked.output
        assert record.first_at is not None and record.ended_at is not None
        assert record.asked.at < record.first_at <= record.ended_at
    assert (played.row()["page_ins_per_request"] == 0) == (policy == ALL_RESIDENT)


def run(scenario: Scenario, policy: str = "production", seeds: int = 1, **settings: Any) -> list[Row]:
    """Rows of so many seeds."""
    return [play(scenario, policy, seed, **settings).row() for seed in range(seeds)]


def test_the_same_seed_gives_the_same_row() -> None:
    first, second, third = (play(SMALL, seed=seed).row() for seed in (1, 1, 2))
    assert first == second != third


def test_nothing_is_lost_where_executors_come_and_go() -> None:
    changes = (
        Change(1.0, "join", "executor-2"),
        Change(2.0, "lose", "executor-0"),
        Change(3.0, "leave", "executor-1"),
    )
    played = play(replace(SMALL, changes=changes, traffic=replace(SMALL.traffic, rate=90.0)))
    played.scheduler.check()
    records = played.scheduler.records
    assert all(record.end is End.ANSWERED and record.tokens == record.asked.output for record in records)
    assert max(record.attempts for record in records) == 2
    used = {record.executor for record in records if record.ended_at < 1.0}
    assert used == {"executor-0", "executor-1"}
    assert {record.executor for record in records if record.asked.at > 3.0} == {"executor-2"}


def test_several_schedulers_share_executors_and_lose_nothing() -> None:
    played = play(replace(SMALL, schedulers=3, traffic=replace(SMALL.traffic, rate=90.0)))
    for scheduler in played.schedulers:
        scheduler.check()
        assert len(scheduler.records) >= 170
    assert all(record.tokens == record.asked.output for record in played.records)
    assert len(played.records) == 540


def test_who_waits_for_too_long_gives_up() -> None:
    traffic = Traffic(60.0, output=Lengths("fixed", 200), deadline_s=(0.5, 2.0))
    played = play(replace(SMALL, traffic=traffic))
    row = played.row()
    assert row["missed"] > 0 and row["answered"] > 0 and row["open"] == 0
    for record in played.scheduler.records:
        assert record.end is End.MISSED or record.ended_at - record.asked.at <= record.asked.deadline_s
    assert all(state.num_running == 0 for state in played.scheduler.states.values())


def test_a_gate_refuses_at_once() -> None:
    played = play(SMALL, gate=lambda scheduler, waiting, record: 9.0 if record.number % 2 else None)
    assert {record.end for record in played.scheduler.records[1::2]} == {End.REFUSED}
    assert {record.estimate_s for record in played.scheduler.records[1::2]} == {9.0}
    assert {record.end for record in played.scheduler.records[::2]} == {End.ANSWERED}


def test_turns_of_a_session_follow_each_other_and_share_a_prefix() -> None:
    sessions = Sessions(
        at_once=6, turns=3, pause_s=0.2, said=Lengths("fixed", 100), output=Lengths("fixed", 40)
    )
    played = play(replace(SMALL, traffic=None, sessions=sessions, seconds=10.0))
    records = [record for record in played.scheduler.records if record.asked.shared]
    assert len(records) > 20 and 0.0 < played.row()["next_turns_kept"] <= 1.0
    by_name = dict[str, list[int]]()
    for record in played.scheduler.records:
        by_name.setdefault(record.asked.session, []).append(record.asked.prompt)
    assert all(prompts == [100, 240, 380][: len(prompts)] for prompts in by_name.values())
    assert any(record.cached for record in records)
    assert all(record.cached <= record.asked.shared for record in records)


def test_the_worst_of_several_seeds() -> None:
    rows = run(SMALL, seeds=2)
    told = worst(rows)
    assert told["ttft_p99_s"] == max(row["ttft_p99_s"] for row in rows)
    assert told["tokens_s"] == min(row["tokens_s"] for row in rows)
    assert (told["seed"], told["scenario"], told["executors"]) == (-1, "small", 3)


def test_a_file_of_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace = tmp_path / "rows.json", tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in TRACE))
    arguments = ["zipf200x8x16", "--trace", str(trace), "--seeds", "2", "--json", str(file)]
    assert main([*arguments, "--policies", "production", "fcfs"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["policy"], row["seed"]) for row in rows] == [
        (policy, seed) for policy in ("production", "fcfs") for seed in (0, 1, -1)
    ]
    assert all(row.keys() >= ROW and row["adapters"] == 2 and row["answered"] == 30 for row in rows)
    assert "worst" in capsys.readouterr().out


TRACE = [
    {
        "at": 10.0 + number / 10,
        "prompt_tokens": 50,
        "output_tokens": 8,
        "adapter": ("acme/a", 3, None)[number % 3],
    }
    for number in range(30)
]


def test_the_table_tells_how_many_were_not_answered() -> None:
    """They are in no time of the table, so an overloaded fleet looks quicker than it is."""
    overloaded = replace(SMALL, executors=1, traffic=replace(SMALL.traffic, deadline_s=(0.1, 0.2)))
    row = play(overloaded).row()
    head, line = (re.split(" {2,}", each) for each in table([row]).splitlines())
    told = dict(zip(head, line, strict=True))
    assert int(told["answered"]) == row["answered"] < row["requests"] == int(told["requests"])


def test_a_picture_of_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn where it is installed")
    rows = run(SMALL, seeds=2)
    file = tmp_path / "rows.png"
    draw({"command": "simulate", "rows": [*rows, worst(rows)]}, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_with_coefficients_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"costs": {"step": {}}}))
    assert main(["hot-one", "--seconds", "1", "--coefficients", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


def test_what_nobody_can_run_ends_at_once() -> None:
    too_long, too_large = (
        replace(SMALL, executor=replace(SMALL.executor, max_model_len=200)),
        replace(SMALL, executor=replace(SMALL.executor, max_rank=8)),
    )
    row = play(too_long).row()
    assert row["unfit"] > 0 and row["answered"] > 0 and row["unfit"] + row["answered"] == row["requests"]
    assert play(too_large).row()["unfit"] == play(too_large).row()["requests"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("", "no scenario is named; see --list"),
        ("hot-one --seconds 0", "--seconds is 0, and must be above 0"),
        ("hot-one --seconds nan", "--seconds is nan, and must be above 0"),
        ("hot-one --rate inf", "--rate is inf, and must be above 0"),
        ("hot-one --executors 0", "--executors is 0, and must be at least 1"),
        ("hot-one --seeds 0", "--seeds is 0, and must be at least 1"),
        ("hot-one --workers 0", "--workers is 0, and must be at least 1"),
        ("sessions --rate 5", "--rate: sessions has no rate of requests"),
        ("loss --executors 2", "loss needs executor-3: --executors must be at least 4"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    args: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args.split()) == 1
    out, err = capsys.readouterr()
    assert text in err and err.count("\n") == 1 and not out


def test_settings_that_make_no_executor_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hot-one", "--slots", "0"]) == 1
    assert "slots of an executor is 0, and must be at least 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="max_batched_tokens is 4"):
        replace(SMALL.executor, max_batched_tokens=4)
    with pytest.raises(ValueError, match="host_bytes is 1000"):
        play(replace(SMALL, executor=replace(SMALL.executor, host_bytes=1000)))


def test_a_tenth_of_the_large_fleet() -> None:
    row = play(SCENARIOS["large-short"]).row()
    assert row["answered"] == row["requests"] > 900
