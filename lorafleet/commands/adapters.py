"""`lorafleet adapters`: what operators do with the store behind a scheduler."""

import argparse
import datetime
from pathlib import Path

from lorafleet.commands import aliases, connection
from lorafleet.commands.parsing import Subparsers, add_group
from lorafleet.commands.terminal import ProgressBar, note, say, say_json, short, size, table
from lorafleet.results import AdapterVersion

_REF = "[tenant/]name[@alias | @sha256:<64 hex>]; the alias is `latest` when none is given"


def add_parser(commands: Subparsers) -> None:
    group = add_group(
        commands,
        "adapters",
        "push, list, check, export, remove and alias adapters",
        "Manage the adapters in the store behind a scheduler. A REF is " + _REF + ".",
    )
    _add_push(group)
    connection.add_command(
        group, "list", "list versions", "  lorafleet adapters list\n  lorafleet adapters list support", list_
    ).add_argument("name", nargs="?", default="", metavar="NAME", help="only this adapter's versions")
    connection.add_command(
        group, "show", "show one version", "  lorafleet adapters show acme/support@stable", show
    ).add_argument("ref", metavar="REF", help=_REF)
    connection.add_command(
        group, "verify", "hash what is stored again", "  lorafleet adapters verify", verify
    ).add_argument(
        "ref", nargs="?", default="", metavar="REF", help="only this version (default: all of yours)"
    )
    parser = connection.add_command(
        group, "export", "download a version", "  lorafleet adapters export support ./support", export
    )
    parser.add_argument("ref", metavar="REF", help=_REF)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    connection.add_command(
        group,
        "rm",
        "remove a version",
        "  lorafleet adapters rm support@sha256:<64 hex>\n  lorafleet adapters rm support@old",
        remove,
    ).add_argument("ref", metavar="REF", help="a version, or an alias that goes together with its version")
    aliases.add_parser(group)


def _add_push(group: Subparsers) -> None:
    parser = connection.add_command(
        group,
        "push",
        "check and upload a PEFT folder",
        "  lorafleet adapters push ./out/checkpoint-300 acme/support\n"
        "  lorafleet adapters push ./out support --alias canary\n"
        "  lorafleet adapters push ./out support --dry-run --strict-base",
        push,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as PEFT's save_pretrained wrote it")
    parser.add_argument("name", metavar="[TENANT/]NAME", help="the name to push to")
    parser.add_argument(
        "--alias", default="latest", help="the alias to move (default: %(default)s); '' moves none"
    )
    parser.add_argument(
        "--strict-base", action="store_true", help="refuse an adapter of another base by name, too"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, keep nothing")
    parser.add_argument(
        "--expected-generation",
        type=int,
        metavar="N",
        help="fail unless the alias is at N (0: does not exist)",
    )


def push(args: argparse.Namespace) -> int:
    bar = ProgressBar().bytes(f"pushing {args.name}")
    with connection.connect(args) as client:
        result = client.adapters.push(
            args.folder,
            args.name,
            alias=args.alias,
            strict_base=args.strict_base,
            dry_run=args.dry_run,
            expected_generation=args.expected_generation,
            on_progress=bar,
        )
    for warning in result.version.warnings:
        note(f"warning: {warning}")
    if args.json:
        say_json(result)
        return 0
    done = "would be accepted" if args.dry_run else "pushed" if result.created else "was there already"
    alias = f", {result.alias.alias} is generation {result.alias.generation}" if result.alias else ""
    say(f"{_name(result.version)}@{result.version.digest} {done}{alias}")
    return 0


def list_(args: argparse.Namespace) -> int:
    tenant, _, name = args.name.rpartition("/")
    with connection.connect(args) as client:
        versions = client.adapters.list(name, tenant=tenant)
    if args.json:
        say_json(versions)
        return 0
    rows = [
        (_name(v), short(v.digest), ",".join(v.aliases), v.max_rank, size(v.num_bytes), _date(v.created_at))
        for v in versions
    ]
    say(table(["ADAPTER", "DIGEST", "ALIASES", "RANK", "SIZE", "PUSHED"], rows))
    return 0


def show(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        version = client.adapters.get(args.ref)
    if args.json:
        say_json(version)
        return 0
    say(f"adapter    {_name(version)}\ndigest     {version.digest}\naliases    {', '.join(version.aliases)}")
    say(f"base       {version.base_model}\nsize       {size(version.num_bytes)}, {', '.join(version.dtypes)}")
    say(f"pushed     {_date(version.created_at)}{', protected' if version.protected else ''}")
    say(f"template   {'its own' if version.has_chat_template else 'of the base'}")
    for warning in version.warnings:
        say(f"warning    {warning}")
    say(table(["MODULE", "RANK", "SCALE"], [(m.name, m.rank, round(m.scale, 6)) for m in version.modules]))
    return 0


def verify(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        result = client.adapters.verify(args.ref)
    if args.json:
        say_json(result)
    else:
        for digest, problem in sorted(result.damaged.items()):
            say(f"damaged: {digest}: {problem}")
        say(f"{result.verified} verified, {len(result.damaged)} damaged")
    return 1 if result.damaged else 0


def export(args: argparse.Namespace) -> int:
    bar = ProgressBar().bytes(f"exporting {args.ref}")
    with connection.connect(args) as client:
        folder = client.adapters.pull(args.ref, args.folder, on_progress=bar)
    files = sorted(path.name for path in folder.iterdir())
    if args.json:
        say_json({"folder": str(folder), "files": files})
    else:
        say(f"{folder}: {', '.join(files)}")
    return 0


def remove(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        digest = client.adapters.delete(args.ref)
    if args.json:
        say_json({"digest": digest})
    else:
        say(f"removed {digest}")
    return 0


def _name(version: AdapterVersion) -> str:
    return f"{version.tenant}/{version.name}"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
