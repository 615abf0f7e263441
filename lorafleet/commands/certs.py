"""`lorafleet certs`: a small certificate authority in a folder, for a first fleet behind TLS."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lorafleet.commands.parsing import Subparsers, add_command, count
from lorafleet.errors import LaunchError
from lorafleet.terminal import say

if TYPE_CHECKING:
    from lorafleet.tls.authority import Authority

# Who can show a certificate of the inner CA may run everything on an executor: clients have none of it.
FRONT, INNER = "ca", "executor-ca"
_CA_DAYS = 3650

_DESCRIPTION = f"""\
Make two small certificate authorities in a folder, and certificates of them; or renew these. In FOLDER:

  {FRONT}.crt                 signs schedulers and clients; who connects gets this file (--tls-ca)
  {INNER}.crt        signs executors, and schedulers towards executors; clients have nothing of it
  scheduler.crt          --tls-cert-file of schedulers, if --scheduler names their hosts
  executor.crt           --tls-cert-file of executors, if --executor names their hosts
  scheduler-client.crt   --executor-cert-file of schedulers, made with the first executor.crt
  client-NAME.crt        --tls-cert of a client, for each --client, where schedulers ask for one

and the key of each beside it, as .key, for its owner's eyes only. Keep {FRONT}.key and {INNER}.key away
from machines that serve. Later calls take the CAs that are there; nothing is overwritten but by --renew."""

_EXAMPLES = """\
  lorafleet certs certs --scheduler llm.example.org --executor gpu-1.internal --executor 10.0.0.8
  python -m scheduler ... --tls-cert-file certs/scheduler.crt --tls-key-file certs/scheduler.key \\
      --executor-ca-file certs/executor-ca.crt --executor-cert-file certs/scheduler-client.crt \\
      --executor-key-file certs/scheduler-client.key --tokens-file tokens.toml
  python -m executor ... --tls-cert-file certs/executor.crt --tls-key-file certs/executor.key \\
      --tls-client-ca-file certs/executor-ca.crt
  lorafleet models --target llm.example.org:50051 --tls-ca certs/ca.crt
  lorafleet certs certs --client alice         # for schedulers with --tls-client-ca-file certs/ca.crt
  lorafleet certs certs --renew                # new keys and dates; services notice by themselves"""


def add_parser(commands: Subparsers) -> None:
    summary = "make certificates for schedulers, executors and clients"
    parser = add_command(commands, "certs", summary, _DESCRIPTION, _EXAMPLES, run)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where they are; made when missing")
    for flag, metavar, whose in (
        ("--scheduler", "HOST", "a name or address by which clients reach schedulers"),
        (
            "--executor",
            "HOST",
            "a name or address by which schedulers reach executors, or *.name",
        ),
        ("--client", "NAME", "a client that gets a certificate"),
    ):
        parser.add_argument(
            flag, action="append", default=[], metavar=metavar, help=f"{whose}; repeat it for more"
        )
    parser.add_argument("--renew", action="store_true", help="renew every certificate that is there")
    parser.add_argument(
        "--days", type=count, default=365, help="how long certificates are valid (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except ModuleNotFoundError as error:
        raise LaunchError(f"certificates need {error.name}: pip install 'lorafleet[certs]'") from error
    except FileExistsError as error:
        raise LaunchError(f"{error}; --renew renews it, or name another folder") from error
    except ValueError as error:
        raise LaunchError(f"{args.folder}: {error}") from error


def _run(args: argparse.Namespace) -> int:
    from lorafleet.tls.authority import Authority

    folder: Path = args.folder
    if not (args.scheduler or args.executor or args.client or args.renew):
        raise LaunchError("nothing to make: give --scheduler, --executor, --client or --renew")
    _check_free(folder, args)
    folder.mkdir(parents=True, exist_ok=True)
    front, inner = (_opened(Authority, folder, name) for name in (FRONT, INNER))
    made: list[Path] = []
    if args.renew:
        for authority in (front, inner):
            made += [authority.renew(name, args.days) for name in authority.issued()]
    if args.scheduler:
        made.append(front.issue("scheduler", args.scheduler, server=True, days=args.days))
    if args.executor:
        made.append(inner.issue("executor", args.executor, server=True, days=args.days))
        made.append(inner.issue("scheduler-client", ["lorafleet-scheduler"], server=False, days=args.days))
    made += [front.issue(f"client-{name}", [name], server=False, days=args.days) for name in args.client]
    for file in made:
        say(str(file))
    return 0


def _check_free(folder: Path, args: argparse.Namespace) -> None:
    """Before anything is made. Raises FileExistsError, LaunchError."""
    for name in args.client:
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
            raise LaunchError(f"--client: {name!r} must be of letters, digits, dots and dashes")
    names = [f"client-{name}" for name in args.client]
    names += ["scheduler"] if args.scheduler else []
    names += ["executor", "scheduler-client"] if args.executor else []
    for name in names:
        if (file := folder / f"{name}.crt").exists():
            raise FileExistsError(f"{file} is there already")


def _opened(authority: "type[Authority]", folder: Path, name: str) -> "Authority":
    """The CA that is there, or a new one."""
    if (folder / f"{name}.crt").exists():
        return authority(folder, name)
    return authority.make(folder, name, f"LoraFleet {name}", _CA_DAYS)
