"""`lorafleet adapters list`: which versions, in which order. Filters work on one version at a time."""

import argparse
import datetime
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from lorafleet.commands import connection
from lorafleet.commands.parsing import Subparsers, count
from lorafleet.results import AdapterSummary
from lorafleet.terminal import note, num_bytes, say_json_list, say_table, short, size

_EXAMPLES = """\
  lorafleet adapters list
  lorafleet adapters list support
  lorafleet adapters list --match 'chat-*' --min-rank 32 --sort size --reverse --limit 20
  lorafleet adapters list --deleted --state deleted"""
_KEYS: dict[str, Callable[[AdapterSummary], Any]] = {
    "name": lambda each: (each.name, each.digest),
    "size": lambda each: each.num_bytes,
    "rank": lambda each: each.max_rank,
    "pushed": lambda each: each.created_at,
}


def add_parser(group: Subparsers) -> None:
    parser = connection.add_command(group, "list", "list versions", _EXAMPLES, run)
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="[TENANT/]NAME",
        help="only this adapter's; TENANT/ alone: all of theirs",
    )
    filters = parser.add_argument_group("filters (all that are given must hold)")
    filters.add_argument("--match", metavar="GLOB", help="names like this, as 'chat-*'")
    filters.add_argument("--alias", help="versions that this alias points to")
    filters.add_argument("--state", choices=("active", "draining", "deleted"), help="only in this state")
    filters.add_argument(
        "--deleted", action="store_true", help="deleted ones whose bytes are still there, too"
    )
    filters.add_argument("--protected", action="store_true", help="only those that are protected")
    filters.add_argument("--quarantined", action="store_true", help="only those that were found damaged")
    filters.add_argument("--base", metavar="TEXT", help="made for a base whose name contains this")
    filters.add_argument("--min-rank", type=int, metavar="N", help="of this rank at least")
    filters.add_argument("--max-rank", type=int, metavar="N", help="of this rank at most")
    filters.add_argument("--larger", type=num_bytes, metavar="SIZE", help="of this size at least, as 100MB")
    filters.add_argument("--smaller", type=num_bytes, metavar="SIZE", help="of this size at most")
    order = parser.add_argument_group("order")
    order.add_argument("--sort", choices=tuple(_KEYS), help="by this (default: name, as they come)")
    order.add_argument("--reverse", action="store_true", help="largest or latest first")
    order.add_argument("--limit", type=count, metavar="N", help="the first N only")


def run(args: argparse.Namespace) -> int:
    """Any number of versions in little memory, unless they are sorted without --limit."""
    tenant, _, name = args.name.rpartition("/")
    deleted = args.deleted or args.state == "deleted"
    with connection.connect(args) as client:
        found = arranged(chosen(client.adapters.summaries(name, tenant=tenant, deleted=deleted), args), args)
        if args.json:
            say_json_list(found)
            return 0
        total = Total()
        say_table(_HEAD, map(_row, total.counting(found)))
    note(f"{total.count} versions, {size(total.num_bytes)}")
    return 0


class Total:
    def __init__(self) -> None:
        self.count = self.num_bytes = 0

    def counting(self, summaries: Iterable[AdapterSummary]) -> Iterator[AdapterSummary]:
        """The same, counted as they pass."""
        for each in summaries:
            self.count += 1
            self.num_bytes += each.num_bytes
            yield each


def chosen(summaries: Iterable[AdapterSummary], args: argparse.Namespace) -> Iterator[AdapterSummary]:
    """Those that all filters in `args` let through."""
    tests = [
        test
        for option, test in _tests(args)
        if option is not None and option is not False  # 0 is a bound, too
    ]
    return (each for each in summaries if all(test(each) for test in tests))


def arranged(summaries: Iterable[AdapterSummary], args: argparse.Namespace) -> Iterable[AdapterSummary]:
    """In the order of `args`; a bounded number of them takes bounded memory."""
    if args.sort is None and not args.reverse:
        return itertools.islice(summaries, args.limit)
    key = _KEYS[args.sort or "name"]
    if args.limit is None:
        return sorted(summaries, key=key, reverse=args.reverse)
    return (heapq.nlargest if args.reverse else heapq.nsmallest)(args.limit, summaries, key=key)


def _tests(args: argparse.Namespace) -> list[tuple[object, Callable[[AdapterSummary], bool]]]:
    return [
        (args.match, lambda each: fnmatchcase(each.name, args.match)),
        (args.alias, lambda each: args.alias in each.aliases),
        (args.state, lambda each: each.state == args.state),
        (args.protected, lambda each: each.protected),
        (args.quarantined, lambda each: each.quarantined),
        (args.base, lambda each: args.base in each.base_model),
        (args.min_rank, lambda each: each.max_rank >= args.min_rank),
        (args.max_rank, lambda each: each.max_rank <= args.max_rank),
        (args.larger, lambda each: each.num_bytes >= args.larger),
        (args.smaller, lambda each: each.num_bytes <= args.smaller),
    ]


_HEAD = ("ADAPTER", "DIGEST", "ALIASES", "RANK", "SIZE", "PUSHED", "STATE")


def _row(each: AdapterSummary) -> tuple[object, ...]:
    flags = [
        "" if each.state == "active" else each.state,
        "protected" if each.protected else "",
        "damaged" if each.quarantined else "",
    ]
    return (
        f"{each.tenant}/{each.name}",
        short(each.digest),
        ",".join(each.aliases),
        each.max_rank,
        size(each.num_bytes),
        datetime.datetime.fromtimestamp(each.created_at).strftime("%Y-%m-%d %H:%M"),
        " ".join(filter(None, flags)),
    )
