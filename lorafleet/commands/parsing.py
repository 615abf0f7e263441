"""How every command's parser is made: a description that explains and examples to copy."""

import argparse
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
