"""`lorafleet adapters alias`: lists, sets and removes aliases, the movable pointers to versions."""

import argparse
from collections.abc import Sequence

from lorafleet.commands import connection
from lorafleet.commands.parsing import Subparsers, add_group, count
from lorafleet.errors import invalid
from lorafleet.results import AdapterAlias
from lorafleet.terminal import say, say_json, short, table


def add_parser(commands: Subparsers) -> None:
    group = add_group(
        commands, "alias", "list, set and remove aliases", "List, set and remove the aliases of adapters."
    )
    connection.add_command(
        group, "list", "list aliases", "  lorafleet adapters alias list support", list_
    ).add_argument(
        "name",
        nargs="?",
        default="",
        metavar="[TENANT/]NAME",
        help="only this adapter's; TENANT/ alone: all of theirs",
    )
    parser = connection.add_command(
        group,
        "set",
        "move or make an alias, atomically",
        "  lorafleet adapters alias set acme/support@stable latest\n"
        "  lorafleet adapters alias set support@stable sha256:<64 hex> --expected-generation 3\n"
        "  lorafleet adapters alias set support@prod v1=90 v2=10",
        set_,
    )
    _add_alias(parser)
    parser.add_argument(
        "to",
        nargs="+",
        type=_target,
        metavar="TARGET[=WEIGHT]",
        help="a digest or another alias of the same adapter; several with weights split the traffic: all"
        " requests of one session_id get the same version",
    )
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


def _target(text: str) -> tuple[str, int | None]:
    """Raises ArgumentTypeError for a weight that is no number."""
    target, equals, weight = text.partition("=")
    return target, count(weight) if equals else None


def targets(given: Sequence[tuple[str, int | None]]) -> str | dict[str, int]:
    """What the client takes. Raises InvalidRequest for a split without weights, or a target named twice."""
    if len(given) == 1 and given[0][1] is None:
        return given[0][0]
    weights: dict[str, int] = {}
    for target, weight in given:
        if weight is None:
            raise invalid("target", f"{target} needs a weight, as in v1=90 v2=10")
        if target in weights:
            raise invalid("target", f"{target} is named twice")
        weights[target] = weight
    return weights


def list_(args: argparse.Namespace) -> int:
    tenant, _, name = args.name.rpartition("/")
    with connection.connect(args) as client:
        aliases = client.adapters.aliases(name, tenant=tenant)
    if args.json:
        say_json(aliases)
        return 0
    rows = [(f"{a.tenant}/{a.name}@{a.alias}", _where(a), a.generation) for a in aliases]
    say(table(["ALIAS", "VERSION", "GENERATION"], rows))
    return 0


def _where(alias: AdapterAlias) -> str:
    split = (f"{short(digest)}={weight}" for digest, weight in alias.targets.items())
    return " ".join(split) or short(alias.digest)


def set_(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        alias = client.adapters.set_alias(
            args.alias, targets(args.to), expected_generation=args.expected_generation
        )
    if args.json:
        say_json(alias)
    else:
        name = f"{alias.tenant}/{alias.name}@{alias.alias}"
        split = [f"{weight} to {digest}" for digest, weight in alias.targets.items()]
        say(f"{name} is {', '.join(split) or alias.digest}, generation {alias.generation}")
    return 0


def remove(args: argparse.Namespace) -> int:
    with connection.connect(args) as client:
        client.adapters.delete_alias(args.alias)
    if args.json:
        say_json({"removed": args.alias})
    else:
        say(f"removed {args.alias}")
    return 0
