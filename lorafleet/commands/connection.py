"""Where the commands find the scheduler, and who they say they are."""

import argparse
import os
from pathlib import Path

from lorafleet.client import DEFAULT_TARGET, Client
from lorafleet.commands import parsing
from lorafleet.commands.parsing import Run, Subparsers
from lorafleet.errors import invalid
from lorafleet.tls.files import Tls

DEFAULT_TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection (the token is read from LORAFLEET_TOKEN)")
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=os.environ.get("LORAFLEET_TARGET") or DEFAULT_TARGET,
        help="the scheduler's address (default: $LORAFLEET_TARGET or %(default)s)",
    )
    group.add_argument(
        "--tls",
        action="store_true",
        help="connect with TLS, as the next three do (or LORAFLEET_TLS=1)",
    )
    for flag, text in _TLS_FILES.items():
        variable = _variable(flag)
        default = Path(os.environ[variable]) if os.environ.get(variable) else None
        group.add_argument(
            flag, type=Path, metavar="FILE", default=default, help=f"{text} (default: ${variable})"
        )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parsing.seconds,
        default=DEFAULT_TIMEOUT,
        help="give up after so long (default: %(default)g)",
    )


_TLS_FILES = {
    "--tls-ca": "the CA of the server's certificate, in place of the well-known ones",
    "--tls-cert": "a certificate of your own, where the server asks for one",
    "--tls-key": "its key",
}


def _variable(flag: str) -> str:
    return "LORAFLEET_" + flag.removeprefix("--").replace("-", "_").upper()


def add_command(
    group: Subparsers, name: str, summary: str, examples: str, run: Run
) -> argparse.ArgumentParser:
    """A command of a group that calls the scheduler and can print JSON."""
    parser = parsing.add_command(group, name, summary, summary[0].upper() + summary[1:] + ".", examples, run)
    parsing.add_json(parser)
    add_arguments(parser)
    return parser


def connect(args: argparse.Namespace, *, timeout: float | None = None) -> Client:
    """A client as the arguments say; `timeout` in place of theirs. Raises InvalidRequest for files that
    cannot be used."""
    token = os.environ.get("LORAFLEET_TOKEN")
    return Client(args.target, token=token, tls=tls_of(args), timeout=timeout or args.timeout)


def tls_of(args: argparse.Namespace) -> Tls | None:
    """None is a connection in clear. Raises InvalidRequest for a certificate without its key."""
    wanted = args.tls or os.environ.get("LORAFLEET_TLS", "").lower() in ("1", "true")
    if not (wanted or args.tls_ca or args.tls_cert or args.tls_key):
        return None
    try:
        return Tls(args.tls_ca, args.tls_cert, args.tls_key)
    except ValueError as error:
        raise invalid("--tls-cert, --tls-key", str(error)) from error
