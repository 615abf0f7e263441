"""The `lorafleet` command: parses, calls a command group, and turns every failure into one line."""

import argparse
import os
import sys
from collections.abc import Sequence

from lorafleet.bench.errors import BenchError
from lorafleet.commands import adapters, bench, certs, chat, demo, executors, generate, models, serve, top
from lorafleet.commands.failure import explain
from lorafleet.commands.near import near_of_command
from lorafleet.doors.settings import QuietParser
from lorafleet.errors import LaunchError, LoraFleetError, ServiceEnded
from lorafleet.plan import command as plan
from lorafleet.terminal import note
from lorafleet.usage import command as usage

FAILED, USAGE, INTERRUPTED = 1, 2, 130

_DESCRIPTION = """\
One base model, thousands of LoRA adapters: serve them on this machine, push adapters, ask them.

Start with `lorafleet demo`, which needs no arguments, or with a model of your own:
`lorafleet serve --model FOLDER --store FOLDER` in one terminal, the other commands in another."""

_EPILOG = """\
exit status:
  0 done; 1 the request failed, one line on stderr says why; 2 wrong usage; 130 interrupted

environment:
  LORAFLEET_TARGET  host:port of the scheduler (default 127.0.0.1:50051)
  LORAFLEET_TOKEN   who you are, when the scheduler asks for it
  LORAFLEET_TLS=1, LORAFLEET_TLS_CA, LORAFLEET_TLS_CERT, LORAFLEET_TLS_KEY
                    connect with TLS; files as those of --tls-ca, --tls-cert, --tls-key"""


def parser() -> argparse.ArgumentParser:
    root = QuietParser(
        prog="lorafleet",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in (demo, serve, generate, chat, adapters, models, top, executors, bench, plan, certs, usage):
        group.add_parser(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit status; wrong usage exits with 2, as argparse does."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    except (
        BrokenPipeError
    ):  # the reader of our output is gone; the interpreter must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except LoraFleetError as error:
        target = getattr(args, "target", "this machine")
        return _fail(explain(error, target, near_of_command(error, args)))
    except ServiceEnded as error:
        _fail(str(error))
        return error.status or FAILED
    except (LaunchError, BenchError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(message: str) -> int:
    note("error: " + " ".join(message.split()))
    return FAILED
