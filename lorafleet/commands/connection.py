"""Where the commands find the scheduler, and who they say they are."""

import argparse
import os
from pathlib import Path

import grpc

from lorafleet.client import DEFAULT_TARGET, Client
from lorafleet.commands import parsing
from lorafleet.commands.parsing import Run, Subparsers

DEFAULT_TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection (the token is read from LORAFLEET_TOKEN)")
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=os.environ.get("LORAFLEET_TARGET") or DEFAULT_TARGET,
        help="the scheduler's address (default: $LORAFLEET_TARGET or %(default)s)",
    )
    group.add_argument("--tls", action="store_true", help="connect with TLS")
    group.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="connect with TLS and trust these roots, not the system's"
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parsing.seconds,
        default=DEFAULT_TIMEOUT,
        help="give up after so long (default: %(default)g)",
    )


def add_command(
    group: Subparsers, name: str, summary: str, examples: str, run: Run
) -> argparse.ArgumentParser:
    """A command of a group that calls the scheduler and can print JSON."""
    parser = parsing.add_command(group, name, summary, summary[0].upper() + summary[1:] + ".", examples, run)
    parsing.add_json(parser)
    add_arguments(parser)
    return parser


def connect(args: argparse.Namespace, *, timeout: float | None = None) -> Client:
    """A client as the arguments say; `timeout` in place of theirs. Raises OSError for unreadable roots."""
    token = os.environ.get("LORAFLEET_TOKEN")
    return Client(args.target, token=token, tls=credentials(args), timeout=timeout or args.timeout)


def credentials(args: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """None without TLS. Raises OSError when the roots cannot be read."""
    if not (args.tls or args.tls_ca):
        return None
    return grpc.ssl_channel_credentials(args.tls_ca.read_bytes() if args.tls_ca else None)
