"""`lorafleet executors`: takes an executor out of service, and puts it back."""

import argparse

from lorafleet.commands import connection
from lorafleet.commands.parsing import Run, Subparsers, add_group
from lorafleet.results import Executor
from lorafleet.terminal import say, say_json


def add_parser(commands: Subparsers) -> None:
    group = add_group(
        commands,
        "executors",
        "take executors out of service, and back",
        "Take executors out of service, and back. It is one scheduler's doing, until its restart: where\n"
        "several share an executor, tell each of them. `lorafleet top` shows all executors.",
    )
    for name, summary, run in (
        ("cordon", "send no new requests to an executor", cordon),
        ("uncordon", "send requests to an executor again", uncordon),
        ("drain", "cordon an executor and wait until its requests have ended", drain),
    ):
        _add(group, name, summary, run)


def _add(group: Subparsers, name: str, summary: str, run: Run) -> None:
    parser = connection.add_command(group, name, summary, f"  lorafleet executors {name} 10.0.0.7:50061", run)
    parser.add_argument("address", metavar="NAME", help="as `lorafleet top` shows it, or its host:port")


def cordon(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        return _tell(args, client.cordon(args.address), "gets no new requests")


def uncordon(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        return _tell(args, client.cordon(args.address, False), "gets requests again")


def drain(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        return _tell(args, client.drain(args.address), "gets no new requests, and has none left")


def _tell(args: argparse.Namespace, executor: Executor, text: str) -> int:
    if args.json:
        say_json(executor)
    else:
        running = f"; {executor.running} still run there" if executor.running else ""
        say(f"{executor.name} {text}{running}")
    return 0
