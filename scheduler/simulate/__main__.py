"""`python -m scheduler.simulate`: what a fleet will do, on virtual time, by scenario, policy and seed."""

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from lorafleet.bench.errors import BenchError
from lorafleet.bench.results import head, write
from scheduler.simulate.baselines import POLICIES
from scheduler.simulate.costs import DEFAULT, read_costs
from scheduler.simulate.picture import draw
from scheduler.simulate.report import table
from scheduler.simulate.requests import Asked
from scheduler.simulate.run import Row, play, worst
from scheduler.simulate.scenario import ALL_RESIDENT, Scenario
from scheduler.simulate.scenarios import SCENARIOS
from scheduler.simulate.traffic import asked_of_trace


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.list:
        for each in SCENARIOS.values():
            sys.stdout.write(f"{each.name:16} {each.about}\n")
        return 0
    try:
        began = time.monotonic()
        rows = list(_run(args))
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = {"took_s": round(time.monotonic() - began, 1), "cpu_s": round(cpu.ru_utime + cpu.ru_stime, 1)}
        told = head("python -m scheduler.simulate") | {"coefficients": args.coefficients}
        whole = {**told, **took, "rows": rows}
        if args.json:
            write(args.json, whole)
        if args.png:
            draw(whole, args.png)
    except (BenchError, ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate", description=__doc__)
    parser.add_argument(
        "scenarios", nargs="*", choices=[*SCENARIOS, []], metavar="SCENARIO", help="see --list"
    )
    parser.add_argument("--list", action="store_true", help="show the scenarios")
    known = [*POLICIES, ALL_RESIDENT]
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=known,
        default=["production"],
        metavar="POLICY",
        help=", ".join(known),
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many; the worst of each figure is told (1)")
    parser.add_argument("--rate", type=float, nargs="+", help="requests a second, in place of the scenario's")
    parser.add_argument("--seconds", type=float, help="of arrivals, in place of the scenario's")
    parser.add_argument("--executors", type=int, help="in place of the scenario's")
    parser.add_argument("--slots", type=int, help="of an executor, in place of the scenario's")
    parser.add_argument("--trace", type=Path, help="its requests, in place of the scenario's")
    parser.add_argument("--coefficients", default=DEFAULT, help=f"a name or a .json file ({DEFAULT})")
    parser.add_argument("--single-steps", action="store_true", help="skip over nothing: for a few executors")
    parser.add_argument("--workers", type=int, default=1, help="processes (1)")
    parser.add_argument("--json", type=Path, help="where rows go")
    parser.add_argument("--png", type=Path, help="where a picture goes; needs matplotlib")
    return parser


def _run(args: argparse.Namespace) -> Iterator[Row]:
    """The rows: for each scenario, rate and policy a row a seed, and the worst of several."""
    _check(args)
    asked = list[Asked]()
    adapters = 0
    if args.trace:
        asked, adapters = asked_of_trace(args.trace)
    jobs = [
        (_changed(SCENARIOS[name], rate, asked, adapters, args), policy)
        for name in args.scenarios
        for rate in args.rate or [None]
        for policy in args.policies
    ]
    seeds = range(args.seed, args.seed + args.seeds)
    with ProcessPoolExecutor(args.workers) as pool:
        found = [
            [pool.submit(_row, *job, seed, args.coefficients, args.single_steps, asked) for seed in seeds]
            for job in jobs
        ]
        for of_job in found:
            rows = [each.result() for each in of_job]
            yield from rows
            if len(rows) > 1:
                yield worst(rows)


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError."""
    if not args.scenarios:
        raise ValueError("no scenario is named; see --list")
    for name in ("executors", "seeds", "workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, and must be at least 1")
    given = [("seconds", args.seconds), *(("rate", rate) for rate in args.rate or ())]
    for name, value in given:
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name} is {value:g}, and must be above 0")


def _changed(
    scenario: Scenario, rate: float | None, asked: list[Asked], adapters: int, args: argparse.Namespace
) -> Scenario:
    """A trace is played to its end, and measured from its beginning."""
    if rate is not None:
        if scenario.traffic is None or asked:
            raise ValueError(f"--rate: {args.trace or scenario.name} has no rate of requests")
        scenario = scenario.at_rate(rate)
    if args.executors is not None:
        scenario = replace(scenario, executors=args.executors)
        for change in scenario.changes:
            if change.name not in scenario.names:
                least = int(change.name.rpartition("-")[2]) + 1
                raise ValueError(f"{scenario.name} needs {change.name}: --executors must be at least {least}")
    if args.slots is not None:
        scenario = replace(scenario, executor=replace(scenario.executor, slots=args.slots))
    if asked:
        trace_s = args.seconds or asked[-1].at + 1.0
        scenario = scenario.at_rate(round(sum(each.at < trace_s for each in asked) / trace_s, 3))
        return replace(scenario, adapters=adapters, sessions=None, seconds=trace_s, warm_s=0.0)
    if args.seconds is not None:
        return replace(scenario, seconds=args.seconds, warm_s=min(scenario.warm_s, args.seconds / 4))
    return scenario


def _row(
    scenario: Scenario,
    policy: str,
    seed: int,
    coefficients: str,
    single_steps: bool,
    asked: list[Asked],
) -> Row:
    costs = read_costs(coefficients)
    within = [each for each in asked if each.at < scenario.seconds] or None
    return play(scenario, policy, seed, costs=costs, single_steps=single_steps, asked=within).row()


if __name__ == "__main__":
    raise SystemExit(main())
