"""How every command's parser is made: a description that explains and examples to copy."""

import argparse
import shlex
from collections.abc import Callable
from typing import Any

Subparsers = Any  # argparse's own type for this is private
Run = Callable[[argparse.Namespace], int]
"""Does the command's work and returns its exit status."""


def add_command(
    commands: Subparsers, name: str, summary: str, description: str, examples: str, run: Run
) -> argparse.ArgumentParser:
    """summary: for the list of commands; description: what `lorafleet NAME --help` begins with."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_group(commands: Subparsers, name: str, summary: str, description: str) -> Subparsers:
    """A command that only has commands of its own."""
    parser = commands.add_parser(name, help=summary, description=description)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def count(text: str) -> int:
    """A number of things: 1 or more. Raises ArgumentTypeError, as all types of arguments here."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def count_or_auto(text: str) -> str:
    """The same as `count`, or "auto": for a service to read. Raises ArgumentTypeError."""
    return text if text == "auto" else str(count(text))


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def arguments(text: str) -> tuple[str, ...]:
    """Words as a shell splits them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {error}") from error


def add_service_arguments(parser: argparse._ActionsContainer) -> None:
    """scheduler_args and executor_args, for commands that start services."""
    for service in ("scheduler", "executor"):
        parser.add_argument(
            f"--{service}-args",
            type=arguments,
            default=(),
            metavar="ARGS",
            help=f"more arguments, as --{service}-args='--log-level debug': see `python -m {service} --help`",
        )
