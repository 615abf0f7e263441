"""`lorafleet bench load` and `preset`: what is measured, and where the results go."""

import argparse
import os
from pathlib import Path

from lorafleet.bench.errors import BenchError
from lorafleet.bench.plot import check_pictures
from lorafleet.bench.system import SystemConfig
from lorafleet.commands import connection
from lorafleet.commands.parsing import add_service_arguments, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where the results go."""
    system = parser.add_argument_group("what is measured (default: the scheduler at --target)")
    kind = system.add_mutually_exclusive_group()
    kind.add_argument("--local", action="store_true", help="a scheduler and an executor, started for it here")
    kind.add_argument("--in-process", action="store_true", help="an engine alone, started for it here")
    system.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the base model; tells the vocabulary, too"
    )
    system.add_argument("--store", default="", metavar="STORE", help="for --local and --in-process")
    add_service_arguments(system)
    system.add_argument(
        "--step-trace",
        type=Path,
        metavar="FILE",
        help="the executor writes a line for each step here; with --target, it does already",
    )
    system.add_argument(
        "--executor-metrics",
        nargs="+",
        default=(),
        metavar="URL",
        help="with --target: the services' /metrics, which tell what slots did and how busy each was",
    )
    system.add_argument(
        "--ready-timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="give up starting after so long (default: %(default)g)",
    )
    system.add_argument(
        "--vocab-size", type=int, default=0, metavar="N", help="without --model (default: 32000)"
    )
    system.add_argument(
        "--adapter-prefix", default="bench-", metavar="TEXT", help="adapters are called so, with four digits"
    )
    system.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed draws the same requests"
    )
    results = parser.add_argument_group("results (a table on stdout, progress on stderr)")
    results.add_argument("--json", type=Path, metavar="FILE", help="write rows, grown after each measurement")
    results.add_argument("--png", type=Path, metavar="FILE", help="draw them; needs matplotlib")
    results.add_argument(
        "--revision", metavar="TEXT", help="what is measured, where the folder is no git checkout"
    )
    connection.add_arguments(parser)


def config(args: argparse.Namespace) -> SystemConfig:
    traced = ("--step-trace", str(args.step_trace.absolute())) if args.step_trace else ()
    return SystemConfig(
        kind="local" if args.local else "in-process" if args.in_process else "target",
        target=args.target,
        token=os.environ.get("LORAFLEET_TOKEN"),
        tls=connection.tls_of(args),
        timeout=args.timeout,
        metrics_urls=tuple(args.executor_metrics),
        model=args.model,
        store=args.store,
        executor_args=(*args.executor_args, *traced),
        scheduler_args=args.scheduler_args,
        ready_timeout=args.ready_timeout,
        vocab_size=args.vocab_size,
        adapter_prefix=args.adapter_prefix,
        seed=args.seed,
    )


def check_results(args: argparse.Namespace) -> None:
    """Before anything is measured: can the results be kept? Raises BenchError or OSError."""
    if args.png:
        check_pictures()
    for file in (args.json, args.png, args.step_trace):
        if file and not file.parent.is_dir():
            raise BenchError(f"there is no folder {file.parent} for {file.name}")
