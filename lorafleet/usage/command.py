"""`lorafleet usage`: who used what, summed from the usage ledger."""

import argparse
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

from lorafleet.commands.parsing import Subparsers, add_command
from lorafleet.errors import LaunchError
from lorafleet.terminal import note, say
from lorafleet.usage.merge import Skipped, merge
from lorafleet.usage.report import as_csv, as_json, as_text
from lorafleet.usage.sources import Folder, RedisStreams, Source
from lorafleet.usage.sums import FIELDS, sum_up

# Parts of one answer may be so far apart, when --since lies between them.
_APART = timedelta(days=2)


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "usage",
        "who used what: tokens and answers, from the usage ledger",
        "Sum the records that schedulers with --ledger-dir write, one an answer: prompt, cached and output\n"
        "tokens, and answers by outcome. It reads the ledger's folders, a store's Redis, or both, and asks\n"
        "no scheduler. Answers whose end nobody saw are listed apart.",
        "  lorafleet usage --ledger-dir /var/lib/lorafleet/ledger --by tenant,adapter --since 2026-11-01\n"
        "  lorafleet usage --store redis://redis.internal:6379 --by tenant,day --since 2026-11-01 \\\n"
        "    --until 2026-12-01 --format csv",
        run,
    )
    parser.add_argument(
        "--ledger-dir",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a scheduler's --ledger-dir, or a copy of it; repeat it for more",
    )
    parser.add_argument("--store", metavar="STORE", help="the redis://... or rediss://... of the schedulers")
    parser.add_argument(
        "--by",
        type=_names,
        default=("tenant", "adapter"),
        metavar="NAMES",
        help=f"what to sum by: some of {','.join(FIELDS)}, with commas (default: tenant,adapter)",
    )
    for flag, what in (("--since", "from then on"), ("--until", "before then")):
        parser.add_argument(
            flag, type=_moment, metavar="WHEN", help=f"{what}: YYYY-MM-DD, or YYYY-MM-DDTHH:MM:SS, in UTC"
        )
    parser.add_argument(
        "--format", choices=("text", "json", "csv"), default="text", help="(default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    has_days_before = args.since and args.since.replace(tzinfo=None) - datetime.min > _APART
    first_day = (args.since - _APART).date().isoformat() if has_days_before else ""
    sources: list[Source] = [Folder(path, first_day) for path in args.ledger_dir]
    if args.store is not None:
        sources.append(RedisStreams(args.store, first_day))
    if not sources:
        raise LaunchError("nothing to read: give --ledger-dir, --store, or both")
    skipped = Skipped()
    lines = chain.from_iterable(source.lines() for source in sources)
    answers = merge(lines, sum(source.num_bytes() for source in sources), skipped)
    since = args.since.timestamp() if args.since else 0.0
    until = args.until.timestamp() if args.until else float("inf")
    rows = sum_up(answers, args.by, since, until)
    match args.format:
        case "json":
            say(as_json(rows, args.by, skipped.lines))
        case "csv":
            say(as_csv(rows, args.by))
        case _:
            say(as_text(rows, args.by))
    if skipped.lines:
        note(f"{skipped.lines} lines are no whole records, as a crash leaves them, and count for nothing")
    return 0


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= FIELDS.keys() or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {','.join(FIELDS)}, each once")
    return names


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no YYYY-MM-DD or YYYY-MM-DDTHH:MM:SS") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
