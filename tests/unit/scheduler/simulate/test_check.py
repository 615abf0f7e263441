import json
from pathlib import Path

import pytest

from lorafleet.bench.lengths import Lengths
from lorafleet.bench.workload import Description, Names, generate
from scheduler.simulate.check import beside, judged, main, real_loads
from scheduler.simulate.costs import read_costs

COMMAND = (
    "lorafleet bench load --target 127.0.0.1:50051 --rate 20 --requests 60 --popularity zipf --adapters 128 "
    "--prompt-tokens uniform:64:448 --output-tokens uniform:32:224 --seed 3 --json a.json "
    "--executor-args '--max-seats 256 --host-memory-bytes 1 --host-memory-bytes 14000000000'"
)


def load_file(folder: Path, ttft_ms: float) -> Path:
    row = {
        "workload": "load", "slots": 16, "page_ins": 5, "output_tokens_per_s": 2000.0,
        "ttft_ms": {"p50": ttft_ms, "p99": 4 * ttft_ms},
    }  # fmt: skip
    start = {"workload": "start to ready", "slots": None}
    file = folder / "load.json"
    file.write_text(json.dumps({"command": COMMAND, "rows": [start, row]}))
    return file


def test_the_requests_of_a_load_are_drawn_again(tmp_path: Path) -> None:
    [real] = real_loads(load_file(tmp_path, 50.0))
    described = Description(
        60,
        Lengths("uniform", 64, 448),
        Lengths("uniform", 32, 224),
        "zipf",
        128,
        arrivals="poisson",
        rate=20.0,
    )
    sent = generate(described, Names(1000), seed=3)
    assert [(each.at, each.prompt, each.output) for each in real.asked] == [
        (each.at, len(each.prompt_token_ids), each.max_new_tokens) for each in sent
    ]
    assert [int(each.digest[-4:]) for each in real.asked] == [int((each.adapter or "")[-4:]) for each in sent]
    assert real.scenario.executor.host_bytes == 14_000_000_000 and real.scenario.executor.seats == 256


def test_both_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "beside.json"
    main([str(load_file(tmp_path, 50.0)), "--json", str(file)])
    [row] = json.loads(file.read_text())["rows"]
    assert row["measured"]["ttft_p50_s"] == 0.05 and row["requests"] == 60
    assert row["off"]["ttft_p50_s"] == pytest.approx(row["simulated"]["ttft_p50_s"] / 0.05 - 1, abs=1e-3)
    assert json.loads(capsys.readouterr().out)["runs"] == 1


def test_runs_of_one_rate_are_judged_together(tmp_path: Path) -> None:
    costs = read_costs()
    [real] = real_loads(load_file(tmp_path, 50.0))
    row = beside(real, costs)
    simulated = row["simulated"]
    like = [
        row | {"measured": {key: value * share for key, value in simulated.items()}} for share in (0.9, 1.15)
    ]
    [verdict] = judged(like)
    assert verdict["near"] and verdict["p99_within"] and verdict["runs"] == 2
    [verdict] = judged([row | {"measured": {key: 2 * value for key, value in simulated.items()}}] * 2)
    assert not verdict["near"] and not verdict["p99_within"]
