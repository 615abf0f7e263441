"""`lorafleet generate`: one prompt, one answer, streamed."""

import argparse
import sys
from pathlib import Path

from lorafleet.commands import connection
from lorafleet.commands.parsing import Subparsers, add_command, add_json
from lorafleet.constraints.constraint import Constraint
from lorafleet.errors import invalid
from lorafleet.requests import Options, Prompt
from lorafleet.terminal import say, say_json


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "generate",
        "answer one prompt",
        "Answer one prompt on the base model or on an adapter, and print the text as it is made.",
        "  lorafleet generate 'The capital of France is' --max-new-tokens 8\n"
        "  lorafleet generate --chat 'Where is my parcel?' --adapter acme/support\n"
        "  lorafleet generate --chat 'Yes or no?' --choice yes --choice no\n"
        "  lorafleet generate --chat 'Who wrote Faust?' --json-schema person.json\n"
        "  lorafleet generate --temperature 0.8 --seed 7 --json < prompt.txt",
        run,
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; read from stdin when left out")
    parser.add_argument(
        "--adapter", metavar="REF", help="[tenant/]name[@alias | @sha256:...] (default: the base)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message in a conversation"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="a system message before it, with which --chat goes without saying"
    )
    add_sampling_arguments(parser)
    _add_constraint_arguments(parser)
    add_json(parser)
    connection.add_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sampling_options` reads; the server's defaults hold for what is left out."""
    group = parser.add_argument_group("sampling and stopping")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="default: up to the model's length")
    group.add_argument("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that reach P together"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="leave out tokens less likely than P times the likeliest"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--time-limit-ms", type=int, metavar="MS", help="end well after so long")


def _add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    told = "hold the answer to one of these; one that is cut short is the beginning of such a text"
    group = parser.add_argument_group("what the answer must be", told).add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that fits this JSON schema")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="R", help="a text that this regular expression matches as a whole")
    group.add_argument("--lark", type=Path, metavar="FILE", help="a text of this grammar, from its `start`")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="this text, or another one; repeatable"
    )


def _constraint(args: argparse.Namespace) -> Constraint | None:
    if args.json_schema:
        return Constraint.json_schema(_read("json_schema", args.json_schema))
    if args.json_object:
        return Constraint.json_object()
    if args.regex is not None:
        return Constraint.regex(args.regex)
    if args.lark:
        return Constraint.lark(_read("lark", args.lark))
    return Constraint.choice(*args.choice) if args.choice else None


def _read(kind: str, file: Path) -> str:
    """Raises InvalidRequest, OSError."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"constraint.{kind}", f"{file} is not a text in UTF-8") from error


def sampling_options(args: argparse.Namespace) -> Options:
    return Options(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        time_limit_ms=args.time_limit_ms,
    )


def run(args: argparse.Namespace) -> int:
    options = sampling_options(args)
    options["adapter"], options["constraint"] = args.adapter, _constraint(args)
    with connection.connect(args) as client:
        if args.json:
            say_json(client.generate(_prompt(args), **options))
            return 0
        for chunk in client.stream(_prompt(args), **options):
            say(chunk.text, end="")
    say("")
    return 0


def _prompt(args: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if args.prompt is None else args.prompt
    if not (args.chat or args.system):
        return str(text)
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text.strip()}]
