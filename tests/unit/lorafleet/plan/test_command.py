"""`lorafleet plan` over the scheduler's simulator, as it is typed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorafleet.bench.shapes import SHAPES
from lorafleet.cli import main, parser
from lorafleet.plan.arguments import Plan
from lorafleet.plan.search import Fleet
from lorafleet.plan.simulator import Simulator, known_costs
from lorafleet.terminal import size

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "lorafleet/plan/README.md"
SMALL = (
    "plan --model llama-3.1-8b --card h200 --rate 6 --seconds 12 --warm-up 3 --adapters 40 "
    "--prompt-tokens 64 --output-tokens uniform:16:64"
)


def test_a_plan_from_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main([*SMALL.split(), "--ttft-ms", "400", "--stream-tokens-s", "20", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(file.read_text())
    best, rows = Fleet(**found["best"]), found["rows"]
    (row,) = (row for row in rows if Fleet(row["executors"], row["slots"], row["host_bytes"]) == best)
    assert row["meets"] and row["ttft_p99_s"] <= 0.4 and row["stream_tokens_s"] >= 20
    assert f"start each with --max-loras {best.slots} --max-lora-rank 16 " in out
    assert len(err.splitlines()) == len(rows) and "goals met" in err
    assert all(
        Fleet(row["executors"], row["slots"], row["host_bytes"]) >= best for row in rows if row["meets"]
    )


def test_a_plan_from_a_trace_for_a_folder_of_known_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "shapes", "llama-3.1-8b", str(tmp_path / "mine")]) == 0
    trace = tmp_path / "day.jsonl"
    lines = ({"at": n / 4, "prompt_tokens": 50, "output_tokens": 9, "adapter": n % 7} for n in range(60))
    trace.write_text("\n".join(map(json.dumps, lines)))
    args = ["plan", "--model", str(tmp_path / "mine"), "--card", "NVIDIA H200", "--trace", str(trace)]
    assert main([*args, "--ttft-ms", "900", "--warm-up", "1"]) == 0
    assert "1 executor of 8 slots" in capsys.readouterr().out
    assert main([*args, "--ttft-ms", "900", "--warm-up", "99"]) == 1
    assert "no request comes after the --warm-up" in capsys.readouterr().err


def test_a_slow_store_asks_for_more_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for rate in ("10GB", "400MB"):
        args = [*SMALL.split(), "--popularity", "uniform", "--ttft-ms", "400", "--most-executors", "1"]
        assert main([*args, "--adapters", "20", "--warm-up", "12", "--store-rate", rate]) == 0
        out = capsys.readouterr().out
        sizes.append(int(out.partition("--host-memory-bytes ")[2].split()[0]))
    assert sizes[0] < sizes[1]


def test_goals_out_of_reach_fail_with_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--ttft-ms", "1", "--most-executors", "2"]) == 1
    out = capsys.readouterr().out
    assert "no fleet that was tried reaches a p99 TTFT of 1 ms" in out and "missed" in out
    assert main([*SMALL.split(), "--ttft-ms", "20", "--store-rate", "100MB"]) == 1
    assert "more executors do not help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--card A100", "--card A100 is not known; known are: H200"),
        ("--model tiny", "tiny: their times are not measured; known are: llama-3.1-8b on NVIDIA H200"),
        ("--model nowhere", "name a folder with config.json, or llama-3.1-8b"),
        ("--ranks 8:x", "ranks '8:x' are not R, or R:SHARE"),
        ("--ranks 512 --seats 1024", "does not fit a h200 with 8 slots of rank 512"),
        ("--popularity often", "popularity 'often' is not none, one"),
        ("--prompt-tokens 9000", "a request of 9064 tokens: llama-3.1-8b takes 8192"),
        ("--warm-up -1", "--warm-up -1 is no number of seconds"),
        ("--rate 1e7", "more than 1,000,000 requests"),
        ("--most-host-memory 100MB", "is less than two adapters of 83.9 MB take"),
        ("--json nowhere/plan.json", "there is no folder nowhere for plan.json"),
        ("--json .", ". is a folder: --json and --png take files"),
        ("--rate 0.1 --seconds 1", "no request comes after the --warm-up of 3 s"),
        ("--warm-up 0 --burstiness 1e-300", "no request comes after the --warm-up of 0 s"),
        ("--ranks 8:1e308,16:1e308", "each is from 1 to 512, with a share above 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(args: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--ttft-ms", "400", *args.split()]) == 1
    out, err = capsys.readouterr()
    assert text in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"\x81\xff", ":1: not a JSON object"),
        (b'{"at": NaN, "prompt_tokens": 3, "output_tokens": 2}', ":1: at is nan"),
        (b'{"at": 1e999, "prompt_tokens": 3, "output_tokens": 2}', ":1: at is inf"),
    ],
)
def test_a_trace_that_is_none_is_one_line(
    text: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(text)
    assert main(f"plan --model llama-3.1-8b --card H200 --ttft-ms 400 --trace {trace}".split()) == 1
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_model_of_known_shapes_may_take_longer_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As llama-3.1-8b itself does. One answer takes longer than a simulation waits for stragglers."""
    config = {**SHAPES["llama-3.1-8b"], "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at": 0, "prompt_tokens": 9, "output_tokens": 2}\n'
        '{"at": 1, "prompt_tokens": 9, "output_tokens": 40000}\n'
    )
    goals = "--card H200 --ttft-ms 400 --warm-up 0 --most-executors 1"
    assert main(f"plan --model {tmp_path} --trace {trace} {goals}".split()) == 0
    assert "1 executor of 8 slots" in capsys.readouterr().out


@pytest.mark.parametrize("args", ["--ttft-ms 0", "--ttft-ms nan", "--rate -1", "--seats 0"])
def test_wrong_usage_exits_with_2(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL.split(), "--ttft-ms", "400", *args.split()])
    assert ended.value.code == 2 and "is no" in capsys.readouterr().err


def test_the_page_says_what_the_simulator_does() -> None:
    """The answer of its example meets the goal; with fewer slots, or half the host memory, none does. Other
    placement may change the times by half before the page must be written anew."""
    page = PAGE.read_text()
    (typed,) = re.findall(r"^    lorafleet (plan .*)$", page, re.MULTILINE)
    plan = Plan.of(parser().parse_args(shlex.split(typed)))
    line = r"^    ([* ]) +(\d+) +(\d+) +(\S+ .B) +\S+ +(\S+) .* (met|missed)$"
    rows = re.findall(line, page, re.MULTILINE)
    at = next(number for number, row in enumerate(rows) if row[0] == "*")
    _, executors, slots, host, *_ = rows[at]
    fewer = [row for row in rows[:at] if (row[1], row[3]) == (executors, host)][-1]
    halved = [row for row in rows[:at] if (row[1], row[2]) == (executors, slots)][-1]
    with Simulator() as simulator:
        simulator.ask(plan.question(known_costs(simulator.measured, "H200", ["llama-3.1-8b"])))
        for _, executors, slots, host, p99, goals in (rows[at], fewer, halved):
            (host_bytes,) = (each for each in plan.room.host_bytes if size(each) == host)
            fleet = Fleet(int(executors), int(slots), host_bytes)
            outcome = simulator.run(fleet, plan.sizes.kv_tokens[fleet.slots])
            assert plan.goals.met_by(outcome) == (goals == "met"), fleet
            assert outcome.ttft_p99_s * 1e3 == pytest.approx(float(p99.replace(",", "")), rel=0.5)


def test_an_interrupt_tells_what_was_tried() -> None:
    large = [*SMALL.split(), "--ttft-ms", "400", "--seconds", "300"]
    with subprocess.Popen(
        [sys.executable, "-m", "lorafleet", *large],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stderr
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "TTFT p99" in first
    assert "interrupted: this is the best of what was tried so far" in err and "Traceback" not in err
    assert "executors  slots" in out
