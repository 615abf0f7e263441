"""`lorafleet serve`: scheduler, executors and disk store on this machine."""

import argparse
import signal
import sys
from pathlib import Path

from lorafleet.commands.parsing import (
    Subparsers,
    add_command,
    add_service_arguments,
    count,
    count_or_auto,
    port,
    seconds,
)
from lorafleet.local import LocalConfig, LocalFleet
from lorafleet.terminal import note, say

_WAKE_SECONDS = 0.5


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "serve",
        "run scheduler, executor and store on this machine",
        "Run a scheduler, one or more executors and a disk store on this machine, as real processes.\n"
        "Their logs are passed through. Ctrl-C or SIGTERM lets accepted requests finish, then stops\n"
        "all; a second Ctrl-C stops at once. When one process ends by itself, all end with its status.",
        "  lorafleet serve --model ~/models/Llama-3.2-1B --store ~/adapters\n"
        "  lorafleet serve --model M --store S --port 0 --metrics-port 0    # free ports, told when ready\n"
        "  lorafleet serve --model M --store S --executor-args '--num-kv-blocks 2048'\n"
        "  lorafleet serve --model M --store S --host 0.0.0.0 --scheduler-args '--tokens-file tokens.toml\n"
        "      --tls-cert-file certs/scheduler.crt --tls-key-file certs/scheduler.key'",
        run,
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="Hugging Face folder of the base model"
    )
    parser.add_argument(
        "--store",
        required=True,
        metavar="STORE",
        help="where adapters are kept: a folder, made when missing, or redis://...",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="where the scheduler listens (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=port,
        default=50051,
        help="the scheduler's port, 0 is a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics-port",
        type=port,
        default=9400,
        help="the scheduler's /metrics; executors take the next ones; 0 is free ones (default: %(default)s)",
    )
    parser.add_argument("--executors", type=count, default=1, help="how many (default: %(default)s)")
    parser.add_argument(
        "--max-loras", type=count_or_auto, metavar="N", help="adapter slots of an executor, or auto"
    )
    parser.add_argument("--max-lora-rank", type=count, metavar="N", help="the largest rank that a slot holds")
    add_service_arguments(parser)
    parser.add_argument(
        "--ready-timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="give up loading after so long (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    with LocalFleet(_config(args), _pass_through) as fleet:
        fleet.wait_ready(args.ready_timeout)
        say(f"ready: {fleet.target}; metrics: {' '.join([fleet.scheduler_metrics, *fleet.executor_metrics])}")
        while True:  # a signal that arrives just before an endless wait would not end it
            fleet.wait(_WAKE_SECONDS)


def _config(args: argparse.Namespace) -> LocalConfig:
    executor_args: list[str] = []
    for flag in ("max_loras", "max_lora_rank"):
        if (value := getattr(args, flag)) is not None:
            executor_args += [f"--{flag.replace('_', '-')}", str(value)]
    return LocalConfig(
        model=args.model,
        store=args.store,
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        executors=args.executors,
        scheduler_args=args.scheduler_args,
        executor_args=(*executor_args, *args.executor_args),
    )


def _pass_through(service: str, line: str) -> None:
    note(f"[{service}] {line}")
