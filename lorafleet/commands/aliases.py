"""`lorafleet adapters alias`: the movable pointers."""

import argparse

from lorafleet.commands import connection
from lorafleet.commands.parsing import Subparsers, add_group
from lorafleet.commands.terminal import say, say_json, short, table


def add_parser(commands: Subparsers) -> None:
    group = add_group(
        commands, "alias", "list, set and remove aliases", "List, set and remove the aliases of adapters."
    )
    connection.add_command(
        group, "list", "list aliases", "  lorafleet adapters alias list support", list_
    ).add_argument("name", nargs="?", default="", metavar="NAME", help="only this adapter's aliases")
    parser = connection.add_command(
        group,
        "set",
        "move or make an alias, atomically",
        "  lorafleet adapters alias set acme/support@stable latest\n"
        "  lorafleet adapters alias set support@stable sha256:<64 hex> --expected-generation 3",
        set_,
    )
    _add_alias(parser)
    parser.add_argument("to", metavar="TARGET", help="a digest or another alias of the same adapter")
    parser.add_argument(
        "--expected-generation",
        type=int,
        metavar="N",
        help="fail unless the alias is at N (0: does not exist)",
    )
    _add_alias(
        connection.add_command(
            group, "rm", "remove an alias", "  lorafleet adapters alias rm support@canary", remove
        )
    )


def _add_alias(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("alias", metavar="[TENANT/]NAME@ALIAS", help="the alias, written out")


def list_(args: argparse.Namespace) -> int:
    tenant, _, name = args.name.rpartition("/")
    with connection.connect(args) as client:
        aliases = client.adapters.aliases(name, tenant=tenant)
    if args.json:
        say_json(aliases)
        return 0
    rows = [(f"{a.tenant}/{a.name}@{a.alias}", short(a.digest), a.generation) for a in aliases]
    say(table(["ALIAS", "DIGEST", "GENERATION"], rows))
    return 0


def set_(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        alias = client.adapters.set_alias(args.alias, args.to, expected_generation=args.expected_generation)
    if args.json:
        say_json(alias)
    else:
        name = f"{alias.tenant}/{alias.name}@{alias.alias}"
        say(f"{name} is {alias.digest}, generation {alias.generation}")
    return 0


def remove(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        client.adapters.delete_alias(args.alias)
    if args.json:
        say_json({"removed": args.alias})
    else:
        say(f"removed {args.alias}")
    return 0
