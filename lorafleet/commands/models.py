"""`lorafleet models`: the base model and adapters that a request may name, and the families."""

import argparse

from lorafleet.commands import connection
from lorafleet.commands.parsing import Subparsers, add_command, add_json
from lorafleet.errors import LaunchError
from lorafleet.terminal import say, say_json, short, table


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "models",
        "list the base model and the adapters you may use",
        "List the base model and the adapters that you may name in a request.",
        "  lorafleet models\n  lorafleet models --json | jq -r '.adapters[].adapter'\n"
        "  lorafleet models --families",
        run,
    )
    parser.add_argument(
        "--families",
        action="store_true",
        help="list the families of base models that can be served, with their traits; asks no server",
    )
    add_json(parser)
    connection.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.families:
        return _families(args)
    with connection.connect(args) as client:
        models = client.models()
    if args.json:
        say_json(models)
        return 0
    say(f"base model {models.base_model}, {models.max_model_len} tokens, {models.fingerprint[:12]}")
    if models.adapters:
        rows = [(model.adapter, short(model.digest), model.max_rank) for model in models.adapters]
        say(table(["ADAPTER", "DIGEST", "RANK"], rows))
    return 0


def _families(args: argparse.Namespace) -> int:
    try:
        from adapter_store.base.traits import DESCRIBED
    except ModuleNotFoundError as error:
        text = f"families need the package {error.name}: pip install 'lorafleet[store]'"
        raise LaunchError(text) from error
    if args.json:
        say_json(DESCRIBED)
        return 0
    rows = [(name, family.published, ", ".join(family.traits)) for name, family in DESCRIBED.items()]
    say(table(["FAMILY", "MODELS", "TRAITS"], rows))
    return 0
