"""`lorafleet adapters`: what operators do with the store behind a scheduler."""

import argparse
import datetime
from pathlib import Path

from lorafleet.commands import aliases, connection, listing, migrate, push, upkeep
from lorafleet.commands.parsing import Subparsers, add_group
from lorafleet.commands.report import content, differences
from lorafleet.results import AdapterVersion
from lorafleet.terminal import ProgressBar, say, say_json, size, table

_REF = "[tenant/]name[@alias | @sha256:<64 hex>]; the alias is `latest` when none is given"


def add_parser(commands: Subparsers) -> None:
    group = add_group(
        commands,
        "adapters",
        "push, list, check, alias, pin, drain, export, move and remove adapters",
        "Manage the adapters in the store behind a scheduler. A REF is " + _REF + ".",
    )
    push.add_parser(group)
    listing.add_parser(group)
    connection.add_command(
        group, "show", "show one version", "  lorafleet adapters show acme/support@stable", show
    ).add_argument("ref", metavar="REF", help=_REF)
    parser = connection.add_command(
        group,
        "diff",
        "tell two versions apart",
        "  lorafleet adapters diff support@stable support@latest",
        diff,
    )
    parser.add_argument("old", metavar="REF", help=_REF)
    parser.add_argument("new", metavar="REF", help=_REF)
    connection.add_command(
        group, "verify", "hash what is stored again", "  lorafleet adapters verify", verify
    ).add_argument(
        "ref", nargs="?", default="", metavar="REF", help="only this version (default: all that you see)"
    )
    parser = connection.add_command(
        group, "export", "download a version", "  lorafleet adapters export support ./support", export
    )
    parser.add_argument("ref", metavar="REF", help=_REF)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    parser = connection.add_command(
        group,
        "rm",
        "take a version from all new requests; `gc` frees its bytes later",
        "  lorafleet adapters rm support@sha256:<64 hex>\n"
        "  lorafleet adapters rm support@old\n"
        "  lorafleet adapters rm support@bad --force --now",
        remove,
    )
    parser.add_argument(
        "ref", metavar="REF", help="a version, or an alias that goes together with its version"
    )
    parser.add_argument("--force", action="store_true", help="although aliases or a protection hold it")
    parser.add_argument("--now", action="store_true", help="end the requests that run, too")
    upkeep.add_parser(group)
    migrate.add_parser(group)
    aliases.add_parser(group)


def show(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        version = client.adapters.get(args.ref)
    if args.json:
        say_json(version)
        return 0
    say(f"adapter    {_name(version)}\ndigest     {version.digest}\naliases    {', '.join(version.aliases)}")
    say(f"base       {version.base_model}\nsize       {size(version.num_bytes)}, {', '.join(version.dtypes)}")
    say(f"pushed     {_date(version.created_at)}{', protected' if version.protected else ''}")
    say(f"state      {version.state}{', damaged' if version.quarantined else ''}")
    say(f"template   {'its own' if version.has_chat_template else 'of the base'}")
    say(f"ends       of the base{''.join(f', {each}' for each in version.end_token_ids)}")
    own = ", ".join(f"{name} {token!r}" for name, token in sorted(version.special_tokens.items()))
    say(f"tokens     {own or 'of the base'}")
    say(f"content    {content(version)}")
    for warning in version.warnings:
        say(f"warning    {warning}")
    say(table(["MODULE", "RANK", "SCALE"], [(m.name, m.rank, round(m.scale, 6)) for m in version.modules]))
    return 0


def diff(args: argparse.Namespace) -> int:
    """Answers as diff does: 1 when there are differences."""
    with connection.connect(args) as client:
        old, new = client.adapters.get(args.old), client.adapters.get(args.new)
    lines = differences(old, new)
    if args.json:
        say_json({"old": old.digest, "new": new.digest, "differences": lines})
        return 1 if lines else 0
    say(f"{_name(old)}@{old.digest}\n{_name(new)}@{new.digest}")
    if old.digest != new.digest and not lines:
        lines = ["~ only the values of the weights differ"]
    say("\n".join(lines) or "the same content")
    return 1 if lines else 0


def verify(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        result = client.adapters.verify(args.ref)
    if args.json:
        say_json(result)
    else:
        for damaged, problem in sorted(result.damaged.items()):
            say(f"damaged: {damaged}: {problem}")
        for orphan in result.orphans:
            say(f"orphan: {orphan}: no version has it")
        say(f"{result.verified} verified, {len(result.damaged)} damaged, {len(result.orphans)} orphans")
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
        digest = client.adapters.delete(args.ref, force=args.force, now=args.now)
    if args.json:
        say_json({"digest": digest})
    else:
        say(f"removed {digest}")
    return 0


def _name(version: AdapterVersion) -> str:
    return f"{version.tenant}/{version.name}"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
