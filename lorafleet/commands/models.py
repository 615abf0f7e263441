"""`lorafleet models`: the base model and the adapters that a request may name."""

import argparse

from lorafleet.commands import connection
from lorafleet.commands.parsing import Subparsers, add_command, add_json
from lorafleet.terminal import say, say_json, short, table


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "models",
        "list the base model and the adapters you may use",
        "List the base model and the adapters that you may name in a request.",
        "  lorafleet models\n  lorafleet models --json | jq -r '.adapters[].adapter'",
        run,
    )
    add_json(parser)
    connection.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
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
