"""`lorafleet plan`: how many executors, slots and bytes of host memory a load needs."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from lorafleet.bench import lengths, popularity
from lorafleet.bench.errors import BenchError
from lorafleet.bench.plot import check_pictures
from lorafleet.bench.shapes import SHAPES
from lorafleet.commands.parsing import Subparsers, add_command, count
from lorafleet.plan.arguments import Plan
from lorafleet.plan.load import RANK_FORMS
from lorafleet.plan.picture import draw
from lorafleet.plan.report import progress_line, rows_of, text_of
from lorafleet.plan.search import Search
from lorafleet.plan.simulator import Simulator, known_costs
from lorafleet.plan.sizes import ModelSizes
from lorafleet.terminal import note, num_bytes, say

FAILED, INTERRUPTED = 1, 130


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "plan",
        "how large a fleet a load needs",
        "Find the smallest fleet that reaches your goals: the fewest executors, then the fewest slots of\n"
        "each, then the least host memory. It asks the scheduler's simulator, which runs its own code\n"
        "over a model of executors whose times were measured on a card; nothing is started, and no GPU\n"
        "is needed. What is beside the answer is tried, too: the table is the curve around it.",
        "  lorafleet plan --model llama-3.1-8b --card H200 --rate 40 --ttft-ms 500 \\\n"
        "    --adapters 1000 --popularity zipf --ranks 8:60,16:30,32:10 \\\n"
        "    --prompt-tokens uniform:128:1024 --output-tokens uniform:64:256\n"
        "  lorafleet plan --model ./my-model --card H200 --trace day.jsonl --ttft-ms 500 --png p.png",
        run,
    )
    _add_load(parser.add_argument_group("load"))
    _add_fleet(parser.add_argument_group("fleet"))
    goals = parser.add_argument_group("goals")
    goals.add_argument(
        "--ttft-ms", type=_amount, required=True, metavar="MS", help="p99 of the time to first token, at most"
    )
    goals.add_argument(
        "--stream-tokens-s",
        type=_amount,
        default=0.0,
        metavar="R",
        help="tokens a second that 99 %% of the streams have at least, behind the first (default: any)",
    )
    results = parser.add_argument_group("results (a table on stdout, progress on stderr)")
    results.add_argument(
        "--json", type=Path, metavar="FILE", help="write what was found, and all that was tried"
    )
    results.add_argument("--png", type=Path, metavar="FILE", help="draw the curve; needs matplotlib")


def _add_load(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--rate", type=_amount, metavar="R", help="requests a second, as a Poisson process")
    which.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace, as `lorafleet bench load` reads it"
    )
    group.add_argument(
        "--burstiness",
        type=_amount,
        default=1.0,
        metavar="B",
        help="as in `lorafleet bench load` (default: 1)",
    )
    group.add_argument(
        "--prompt-tokens", default="128", metavar="L", help=f"{lengths.FORMS} (default: %(default)s)"
    )
    group.add_argument(
        "--output-tokens", default="128", metavar="L", help=f"{lengths.FORMS} (default: %(default)s)"
    )
    group.add_argument(
        "--popularity", default="zipf", metavar="P", help=f"{popularity.FORMS} (default: %(default)s)"
    )
    group.add_argument("--adapters", type=count, default=100, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--ranks", default="16", metavar="R", help=f"of adapters: {RANK_FORMS} (default: %(default)s)"
    )
    group.add_argument("--attention-only", action="store_true", help="adapters are on q, k, v and o alone")
    group.add_argument(
        "--seconds",
        type=_amount,
        default=120.0,
        metavar="S",
        help="that count, with --rate (default: %(default)g)",
    )
    group.add_argument(
        "--warm-up",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds before them, from a fleet without any adapter on (default: %(default)g)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed draws the same load")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", required=True, metavar="MODEL", help=f"a folder with config.json, or {', '.join(SHAPES)}"
    )
    group.add_argument("--card", required=True, metavar="CARD", help="the GPU of each executor, as H200")
    group.add_argument(
        "--seats", type=count, default=64, metavar="N", help="of each executor (default: %(default)s)"
    )
    group.add_argument(
        "--most-executors", type=count, default=64, metavar="N", help="that may be had (default: %(default)s)"
    )
    group.add_argument(
        "--most-host-memory",
        type=num_bytes,
        default=num_bytes("256GB"),
        metavar="SIZE",
        help="for adapters, of each executor (default: 256GB)",
    )
    group.add_argument(
        "--store-rate",
        type=num_bytes,
        default=0,
        metavar="SIZE",
        help="bytes a second that an executor reads from the adapter store, as 200MB (default: as measured)",
    )


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def run(args: argparse.Namespace) -> int:
    _check_results(args)
    plan = Plan.of(args)
    with Simulator() as simulator:
        alike = [name for name in SHAPES if plan.model.is_alike(ModelSizes.of(name))]
        costs = known_costs(simulator.measured, args.card, [args.model, *alike])
        simulator.ask(plan.question(costs))
        search = Search(
            plan.goals,
            plan.room,
            run=lambda fleet: simulator.run(fleet, plan.sizes.kv_tokens[fleet.slots]),
            tell=lambda fleet, outcome: note(progress_line(fleet, outcome, plan.goals)),
        )
        try:
            search.find()
            search.around()
        except KeyboardInterrupt:
            note("interrupted: this is the best of what was tried so far")
            _tell(args, plan, search)
            return INTERRUPTED
    _tell(args, plan, search)
    return 0 if search.best else FAILED


def _check_results(args: argparse.Namespace) -> None:
    """Before anything is simulated: can the results be kept?"""
    if args.png:
        check_pictures()
    for file in (args.json, args.png):
        if file and file.is_dir():
            raise BenchError(f"{file} is a folder: --json and --png take files")
        if file and not file.parent.is_dir():
            raise BenchError(f"there is no folder {file.parent} for {file.name}")


def _tell(args: argparse.Namespace, plan: Plan, search: Search) -> None:
    rows = rows_of(search.tried, plan.goals, plan.sizes)
    if not rows:
        return
    say(text_of(rows, search, plan.sizes, plan.settings.seats))
    if args.json:
        found: Mapping[str, object] = {
            "command": shlex.join(["lorafleet", *sys.argv[1:]]),
            "card": args.card,
            "model": plan.model.name,
            "requests": len(plan.load.arrivals),
            "adapters": len(plan.load.ranks),
            "goals": asdict(plan.goals),
            "slot_bytes": plan.sizes.slot_bytes,
            "best": asdict(search.best) if search.best else None,
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.png:
        draw(rows, search.best, plan.goals, args.png)
