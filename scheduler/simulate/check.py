"""`python -m scheduler.simulate.check`: real runs of `lorafleet bench`, and the same ones simulated.

It takes files of `bench load --rate`, with one load each, and of `bench preset real-traffic`. The command in
a file tells the requests, which are drawn again: the same times, lengths and adapters. Adapters were used
before, so they are in host memory, and in slots as far as there are any.
"""

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lorafleet.bench.lengths import Lengths
from lorafleet.bench.results import head, say, write
from lorafleet.bench.statistics import percentile
from lorafleet.bench.traffic.load import ADAPTERS, rank_of
from lorafleet.bench.traffic.load import Traffic as RealTraffic
from lorafleet.bench.workload import Description, Names, draw
from scheduler.simulate.adapters import digest_of
from scheduler.simulate.costs import DEFAULT, Costs, read_costs
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.report import rounded
from scheduler.simulate.requests import Asked
from scheduler.simulate.run import Row, play
from scheduler.simulate.scenario import Scenario

NEAR = 0.15
FIGURES = ("ttft_p50_s", "ttft_p99_s", "tokens_s")


@dataclass(frozen=True, slots=True)
class Real:
    """One load as it was measured, and what was asked then."""

    file: str
    load: str
    rate: float
    seed: int
    scenario: Scenario
    asked: list[Asked]
    used: list[str]  # Adapters, before.
    measured: Mapping[str, float]
    page_ins: int


def real_loads(file: Path) -> Iterator[Real]:
    """The loads in a file that came at a rate, up to the capacity."""
    whole = json.loads(file.read_text())
    args, executor = _arguments(whole["command"])
    for row in whole["rows"]:
        if not row.get("ttft_ms"):
            continue
        settings = ExecutorSettings(
            seats=int(executor.get("--max-seats", 64)),
            slots=row["slots"],
            max_batched_tokens=int(executor.get("--max-batched-tokens", 8192)),
            max_model_len=int(executor.get("--max-model-len", 8192)),
            max_rank=int(executor.get("--max-lora-rank", 16)),
            host_bytes=int(executor.get("--host-memory-bytes", 4 << 30)),
        )
        ranks: tuple[int, ...] = (16,)
        if row["workload"] == "load" and "--rate" in args:
            rate, seed = float(args["--rate"]), int(args.get("--seed", 0))
            asked, adapters = _load(args, rate, seed), int(args.get("--adapters", 0))
            used = asked
        elif row["workload"].startswith("real traffic, 0."):
            rate, seed = row["offered_requests_per_s"], 0
            asked = _real_traffic(int(args.get("--draws", 6000)), row["requests"], rate)
            ranks, adapters = tuple(map(rank_of, range(10))), ADAPTERS
            used = _real_traffic(int(args.get("--draws", 6000)), int(args.get("--draws", 6000)), rate)
        else:
            continue
        scenario = Scenario(
            row["workload"],
            f"{row['workload']} of {file.name}",
            executors=1,
            adapters=adapters,
            ranks=ranks,
            executor=settings,
            seconds=asked[-1].at + 1.0,
            warm_s=0.0,
        )
        measured = {
            "ttft_p50_s": row["ttft_ms"]["p50"] / 1000,
            "ttft_p99_s": row["ttft_ms"]["p99"] / 1000,
            "tokens_s": row["output_tokens_per_s"],
        }
        yield Real(
            file=str(file),
            load=row["workload"],
            rate=rate,
            seed=seed,
            scenario=scenario,
            asked=asked,
            used=list(dict.fromkeys(each.digest for each in used if each.digest)),
            measured=measured,
            page_ins=row["page_ins"],
        )


def beside(real: Real, costs: Costs) -> Row:
    """What was measured, what is simulated, and how far that is off."""
    played = play(real.scenario, seed=real.seed, costs=costs, asked=real.asked, preload=real.used)
    records = played.records
    firsts = sorted(ttft for each in records if (ttft := each.ttft_s) is not None)
    ended = max(each.ended_at or 0.0 for each in records)
    simulated = {
        "ttft_p50_s": percentile(firsts, 50),
        "ttft_p99_s": percentile(firsts, 99),
        "tokens_s": sum(each.tokens for each in records) / ended,
    }
    return {
        "file": real.file,
        "load": real.load,
        "rate": real.rate,
        "seed": real.seed,
        "slots": real.scenario.executor.slots,
        "requests": len(records),
        "measured": {key: rounded(real.measured[key]) for key in FIGURES} | {"page_ins": real.page_ins},
        "simulated": {key: rounded(simulated[key]) for key in FIGURES} | {"page_ins": played.page_ins},
        "off": {key: rounded(simulated[key] / real.measured[key] - 1) for key in FIGURES},
    }


def judged(rows: Sequence[Row]) -> list[Row]:
    """Verdicts by load and rate: tokens a second and the median within 15 % in the mean of its runs, and p99
    within the spread of several."""
    told = []
    for load, rate in dict.fromkeys((row["load"], row["rate"]) for row in rows):
        runs = [row for row in rows if (row["load"], row["rate"]) == (load, rate)]
        mean = {
            key: {kind: sum(row[kind][key] for row in runs) / len(runs) for kind in ("measured", "simulated")}
            for key in FIGURES
        }
        off = {key: both["simulated"] / both["measured"] - 1 for key, both in mean.items()}
        p99 = [row["measured"]["ttft_p99_s"] for row in runs]
        verdict: Row = {"load": load, "rate": rate, "runs": len(runs)}
        verdict |= {f"{key}_off": rounded(value) for key, value in off.items()}
        verdict["near"] = all(abs(off[key]) <= NEAR for key in ("tokens_s", "ttft_p50_s"))
        if len(runs) > 1:
            verdict["p99_measured"] = [min(p99), max(p99)]
            verdict["p99_within"] = min(p99) <= mean["ttft_p99_s"]["simulated"] <= max(p99)
        told.append(verdict)
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate.check", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="results of one card")
    parser.add_argument("--coefficients", default=DEFAULT, help=f"a name or a .json file ({DEFAULT})")
    parser.add_argument("--json", type=Path, required=True, help="where both go, side by side")
    args = parser.parse_args(arguments)
    costs = read_costs(args.coefficients)
    rows = [beside(real, costs) for file in args.files for real in real_loads(file)]
    verdicts = judged(rows)
    told = head("python -m scheduler.simulate.check") | {"coefficients": args.coefficients}
    write(args.json, {**told, "loads": verdicts, "rows": rows})
    for verdict in verdicts:
        say(verdict)


def _arguments(command: str) -> tuple[dict[str, str], dict[str, str]]:
    """The options of a command line, and those that it gives executors; the last of equal ones counts."""
    found = _options(shlex.split(command))
    return found, _options(shlex.split(found.get("--executor-args", "")))


def _options(words: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in pairwise(words) if name.startswith("--")}


def _load(args: Mapping[str, str], rate: float, seed: int) -> list[Asked]:
    described = Description(
        int(args.get("--requests", 64)),
        Lengths.parse(args.get("--prompt-tokens", "128")),
        Lengths.parse(args.get("--output-tokens", "128")),
        popularity=args.get("--popularity", "none"),
        adapters=int(args.get("--adapters", 0)),
        arrivals="poisson",
        rate=rate,
    )
    return [
        Asked(
            each.at,
            "" if each.adapter is None else digest_of(each.adapter),
            each.prompt_tokens,
            each.output_tokens,
        )
        for each in draw(described, seed)
    ]


def _real_traffic(draws: int, count: int, rate: float) -> list[Asked]:
    names = Names(2, prefix="")
    return [
        Asked(each.at, digest_of(int(each.adapter or 0)), len(each.prompt_token_ids), each.max_new_tokens)
        for each in RealTraffic(draws=draws).requests(count, rate, names)
    ]


if __name__ == "__main__":
    main()
