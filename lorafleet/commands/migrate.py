"""`lorafleet adapters migrate`: copies all versions and aliases of one store into another."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lorafleet.commands import parsing
from lorafleet.commands.parsing import Subparsers
from lorafleet.errors import LaunchError
from lorafleet.terminal import ProgressBar, note, say, say_json

if TYPE_CHECKING:
    from lorafleet.migration import Migrated

_DESCRIPTION = """\
Copy all versions and aliases of one store into another. It works on the stores themselves, beside the
services, and may be ended at any time: started again, it goes on where it was. Every version is checked
against its digest on both sides; names that are in both stores keep what only the target has. Nothing is
taken from the source. Run it again, without pushes to the source, just before the services change over.

It reads stores of this format, and of formats 2 and 3. In one of format 2 the same content has another
digest: the new ones are told, aliases follow, and requests that name a digest must name the new one. Stores
of both formats kept the files of whoever pushed a content first, for all tenants that pushed it: tenants
that share a content get its weights, what its config says about them, and its chat template."""


def add_parser(group: Subparsers) -> None:
    parser = parsing.add_command(
        group,
        "migrate",
        "copy a store into another one, a folder or a Redis",
        _DESCRIPTION,
        "  lorafleet adapters migrate ./adapters redis://redis.internal:6379 --model ./my-model\n"
        "  lorafleet adapters migrate redis://redis.internal:6379 disk:/backup --model ./my-model",
        run,
    )
    parsing.add_json(parser)
    parser.add_argument("source", metavar="FROM", help="a folder, disk:/folder, redis://... or rediss://...")
    parser.add_argument("target", metavar="TO", help="the same")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="the base model's folder")
    parser.add_argument(
        "--tenant", action="append", default=[], help="only this one; repeat it for more (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be copied")
    parser.add_argument(
        "--allow-volatile", action="store_true", help="take a Redis that may lose in a crash what it has"
    )


def run(args: argparse.Namespace) -> int:
    """1 when a version could not be copied."""
    # The client does without numpy; whoever moves stores has it.
    try:
        from adapter_store import AdapterStoreError, ModelSpec, open_store
        from adapter_store.old_stores.open import open_source
        from lorafleet.migration import migrate
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"migrate needs the package {error.name}: pip install 'lorafleet[redis]'"
        ) from error

    bar = ProgressBar()
    try:
        source, source_format = open_source(args.source, allow_volatile=args.allow_volatile)
        target = open_store(args.target, allow_volatile=args.allow_volatile)
        done = migrate(
            source,
            target,
            ModelSpec.from_folder(args.model),
            source_format=source_format,
            tenants=args.tenant,
            dry_run=args.dry_run,
            on_progress=lambda ended, total: bar.update(f"{total} versions", ended / total if total else 1.0),
        )
    except AdapterStoreError as error:
        raise LaunchError(f"migrate: {error}") from error
    return _tell(args, done)


def _tell(args: argparse.Namespace, done: "Migrated") -> int:
    for ref, problem in done.failed.items():
        note(f"{ref} is not copied: {problem}")
    for ref, digest in done.renamed.items() if not args.json else ():
        say(f"{ref} is {digest}")
    if args.json:
        say_json(done)
    else:
        verb = "would be copied" if args.dry_run else "copied"
        say(f"{done.copied} {verb}, {done.present} were there, {len(done.failed)} failed")
    return 1 if done.failed else 0
