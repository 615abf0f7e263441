"""`lorafleet adapters pin`, `drain`, `gc` and others: which copies and bytes are kept."""

import argparse
import datetime
from collections.abc import Sequence

from lorafleet.commands import connection
from lorafleet.commands.parsing import Run, Subparsers
from lorafleet.results import Freed
from lorafleet.terminal import say, say_json, short, size, table

_REF = "[tenant/]name[@alias | @sha256:<64 hex>]"


def add_parser(group: Subparsers) -> None:
    for name, summary, run in (
        ("protect", "forbid the deletion of a version", protect),
        ("unprotect", "allow the deletion of a version again", unprotect),
        ("drain", "refuse new requests, wait for the others, free every copy", drain),
        ("activate", "take new requests of a drained version again", activate),
    ):
        _add(group, name, summary, run, f"  lorafleet adapters {name} support@stable")
    parser = _add(
        group,
        "pin",
        "load a version on executors and keep it there",
        pin,
        "  lorafleet adapters pin support@stable\n"
        "  lorafleet adapters pin support --tier host --executor 10.0.0.7:50061",
    )
    parser.add_argument(
        "--tier", choices=("slot", "host"), default="slot", help="where (default: %(default)s)"
    )
    _add_executors(parser)
    for name, summary, run in (
        ("unpin", "let executors evict a version again", unpin),
        ("drop", "free the copies on executors once nothing uses them", drop),
    ):
        _add_executors(_add(group, name, summary, run, f"  lorafleet adapters {name} support@old"))
    connection.add_command(
        group,
        "gc",
        "free the bytes of deleted versions that nobody uses any more",
        "  lorafleet adapters gc --dry-run\n  lorafleet adapters gc",
        collect,
    ).add_argument("--dry-run", action="store_true", help="only tell what would go")
    parser = connection.add_command(
        group,
        "rm-damaged",
        "give up a name whose record is damaged, as `verify` tells; `gc` frees its bytes later",
        "  lorafleet adapters rm-damaged acme/support --dry-run\n"
        "  lorafleet adapters rm-damaged acme/support",
        remove_damaged,
    )
    parser.add_argument("name", metavar="[TENANT/]NAME", help="all of its versions and aliases go")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would go")
    connection.add_command(
        group,
        "residency",
        "show the copies on executors",
        "  lorafleet adapters residency\n  lorafleet adapters residency support@stable",
        residency,
    ).add_argument(
        "ref", nargs="?", default="", metavar="REF", help="only this version (default: all that you see)"
    )


def _add(group: Subparsers, name: str, summary: str, run: Run, examples: str) -> argparse.ArgumentParser:
    parser = connection.add_command(group, name, summary, examples, run)
    parser.add_argument("ref", metavar="REF", help=_REF)
    return parser


def _add_executors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="only this one; repeat it for more (default: all)",
    )


def protect(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        version = client.adapters.protect(args.ref)
    return _tell(args, version, f"{version.digest} is protected")


def unprotect(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        version = client.adapters.unprotect(args.ref)
    return _tell(args, version, f"{version.digest} is not protected")


def pin(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        pinned = client.adapters.pin(args.ref, args.tier, executors=args.executor)
    _tell(args, pinned, f"{pinned.digest} is kept by {_names(pinned.executors)}")
    return _missing(args, pinned.missing, "not yet by")


def unpin(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        digest = client.adapters.unpin(args.ref, executors=args.executor)
    return _tell(args, {"digest": digest}, f"{digest} may be evicted")


def drop(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        freed = client.adapters.drop(args.ref, executors=args.executor)
    return _freed(args, freed, "dropped", "still there, in use or held for another name, on")


def drain(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        freed = client.adapters.drain(args.ref)
    return _freed(args, freed, "drained", "not asked, as away:")


def activate(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        version = client.adapters.activate(args.ref)
    return _tell(args, version, f"{version.digest} is active")


def remove_damaged(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        result = client.adapters.delete_damaged(args.name, dry_run=args.dry_run)
    lines = [*result.versions, f"{len(result.versions)} versions, {size(result.num_bytes)}, and all aliases"]
    return _tell(args, result, "\n".join(lines) + (" would go" if args.dry_run else " removed"))


def collect(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        result = client.adapters.collect(dry_run=args.dry_run)
    lines = [*result.versions, f"{len(result.versions)} versions, {size(result.num_bytes)}"]
    return _tell(args, result, "\n".join(lines) + (" would go" if args.dry_run else " freed"))


def residency(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        copies = client.adapters.residency(args.ref)
    rows = [
        (
            copy.executor,
            ",".join(copy.adapters),
            short(copy.digest),
            f"{copy.tier} {copy.slot}" if copy.tier == "slot" else copy.tier,
            copy.max_rank,
            size(copy.num_bytes),
            copy.running,
            _ago(copy.last_use),
            copy.loads,
            copy.evictions,
            "pinned" if copy.pinned else "",
        )
        for copy in copies
    ]
    head = [
        "EXECUTOR",
        "ADAPTER",
        "DIGEST",
        "WHERE",
        "RANK",
        "SIZE",
        "RUNNING",
        "USED",
        "LOADS",
        "EVICTED",
        "",
    ]
    return _tell(args, copies, table(head, rows))


def _tell(args: argparse.Namespace, value: object, text: str) -> int:
    if args.json:
        say_json(value)
    else:
        say(text)
    return 0


def _freed(args: argparse.Namespace, freed: Freed, done: str, left: str) -> int:
    _tell(args, freed, f"{done} {freed.digest}")
    return _missing(args, freed.remaining, left)


def _missing(args: argparse.Namespace, executors: Sequence[str], text: str) -> int:
    """1 when there are some."""
    if executors and not args.json:
        say(f"{text} {_names(executors)}")
    return 1 if executors else 0


def _names(executors: Sequence[str]) -> str:
    return ", ".join(executors) or "no executor"


def _ago(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S") if seconds else "-"
