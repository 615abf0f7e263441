"""`lorafleet adapters push` and `push-all`: folders and archives, one or many at once."""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lorafleet.archive import archive_stem
from lorafleet.client import Client
from lorafleet.commands import connection
from lorafleet.commands.bars import Bars
from lorafleet.commands.failure import explain
from lorafleet.commands.parsing import Subparsers, count
from lorafleet.commands.report import content
from lorafleet.errors import LoraFleetError, QueueFull, invalid
from lorafleet.foreign import CONVERTIBLE_FILES
from lorafleet.results import AdapterVersion, PushResult
from lorafleet.terminal import ProgressBar, note, say, say_json
from lorafleet.transfer import CONFIG_FILE, WEIGHTS_FILE, Progress, adapters_below, few, left_out

_ARCHIVES = (
    "or a zip or tar (plain, gzip, bzip2, xz) of one, with all of the adapter's files in one folder. Other "
    "archives, and links and passwords in them, are not taken: unpack those"
)
_OF_AN_ADAPTER = (CONFIG_FILE, WEIGHTS_FILE, *CONVERTIBLE_FILES)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one adapter of many; `error` says why it was refused."""

    name: str
    result: PushResult | None
    error: str = ""


def add_parser(group: Subparsers) -> None:
    parser = connection.add_command(
        group,
        "push",
        "check and upload an adapter",
        "  lorafleet adapters push ./out/checkpoint-300 acme/support\n"
        "  lorafleet adapters push ./support.tar.gz support --alias canary\n"
        "  lorafleet adapters push ./out support --dry-run --strict",
        push,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help=f"as PEFT's save_pretrained wrote it; {_ARCHIVES}"
    )
    parser.add_argument("name", metavar="[TENANT/]NAME", help="the name to push to")
    _add_options(parser)
    parser.add_argument(
        "--expected-generation",
        type=int,
        metavar="N",
        help="fail unless the alias is at N (0: does not exist)",
    )
    parser = connection.add_command(
        group,
        "push-all",
        "check and upload all adapters in a folder, each under the name of its own folder or archive",
        "  lorafleet adapters push-all ./adapters --tenant acme\n"
        "  lorafleet adapters push-all ./adapters --dry-run --jobs 2",
        push_all,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="with a folder or an archive for each adapter"
    )
    parser.add_argument("--tenant", default="", help="whose they shall be (default: your own)")
    parser.add_argument("--jobs", type=count, default=3, metavar="N", help="at once (default: %(default)s)")
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alias", default="latest", help="the alias to move (default: %(default)s); '' moves none"
    )
    parser.add_argument("--strict", action="store_true", help="refuse what would be taken with warnings, too")
    parser.add_argument(
        "--strict-base", action="store_true", help="refuse an adapter of another base by name, too"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, keep nothing")


def push(args: argparse.Namespace) -> int:
    bar = ProgressBar().bytes(f"pushing {args.name}")
    with connection.connect(args) as client:
        result = _push(client, args.folder, args.name, args, bar, args.expected_generation)
    for warning in result.version.warnings:
        note(f"warning: {warning}")
    if args.folder.is_dir() and (names := left_out(args.folder)):
        note(f"left out, as it changes no answer: {few(names)}")
    if args.json:
        say_json(result)
        return 0
    alias = f", {result.alias.alias} is generation {result.alias.generation}" if result.alias else ""
    say(f"{_name(result.version)}@{result.version.digest} {_done(result, args)}{alias}")
    say(f"  {content(result.version)}")
    return 0


def push_all(args: argparse.Namespace) -> int:
    """Goes on after a refusal; 1 when there was one."""
    sources = adapters_in(args.folder)
    prefix = f"{args.tenant}/" if args.tenant else ""
    bars = Bars([name for name, _ in sources])
    with connection.connect(args) as client, ThreadPoolExecutor(args.jobs) as pool:

        def one(name: str, source: Path) -> Outcome:
            try:
                result = _patiently(client, source, prefix + name, args, bars.bytes(name))
            except (LoraFleetError, OSError) as error:
                bars.failed(name)
                text = explain(error, args.target) if isinstance(error, LoraFleetError) else str(error)
                return Outcome(name, None, text)
            return Outcome(name, result)

        outcomes = list(pool.map(lambda each: one(*each), sources))
    bars.close()
    if args.json:
        say_json(outcomes)
    else:
        for outcome in outcomes:
            say(_line(outcome, args))
            for warning in outcome.result.version.warnings if outcome.result else ():
                note(f"warning: {outcome.name}: {warning}")
    return 1 if any(outcome.error for outcome in outcomes) else 0


def adapters_in(folder: Path) -> list[tuple[str, Path]]:
    """(name, folder or archive) of each adapter in `folder`, sorted: at least one.

    Raises NotADirectoryError, FileNotFoundError, or InvalidRequest when two would get one name.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    if not (found := sorted(_named(folder.iterdir()))):
        raise FileNotFoundError(f"{folder} holds no folder with an {CONFIG_FILE} and no archive")
    for (name, path), (other, second) in itertools.pairwise(found):
        if name == other:
            raise invalid("folder", f"{path.name} and {second.name} would both be {name!r}: rename one")
    return found


def _named(paths: Iterator[Path]) -> Iterator[tuple[str, Path]]:
    """Folders, too, that hold an adapter further below, or in another form: a push tells what to do."""
    for path in paths:
        if any((path / file).is_file() for file in _OF_AN_ADAPTER) or adapters_below(path):
            yield path.name.lower(), path
        elif path.is_file() and (stem := archive_stem(path.name)) is not None:
            yield stem.lower(), path


def _patiently(
    client: Client, source: Path, name: str, args: argparse.Namespace, on_progress: Progress
) -> PushResult:
    """Waits while the server has as many pushes as it takes at once."""
    while True:
        try:
            return _push(client, source, name, args, on_progress, None)
        except QueueFull as error:
            time.sleep(error.retry_after or 1.0)


def _push(
    client: Client,
    source: Path,
    name: str,
    args: argparse.Namespace,
    on_progress: Progress,
    expected_generation: int | None,
) -> PushResult:
    return client.adapters.push(
        source,
        name,
        alias=args.alias,
        strict=args.strict,
        strict_base=args.strict_base,
        dry_run=args.dry_run,
        expected_generation=expected_generation,
        on_progress=on_progress,
    )


def _line(outcome: Outcome, args: argparse.Namespace) -> str:
    if outcome.result is None:
        return f"{outcome.name} refused: {outcome.error}"
    version = outcome.result.version
    return f"{_name(version)}@{version.digest[:19]} {_done(outcome.result, args)}: {content(version)}"


def _done(result: PushResult, args: argparse.Namespace) -> str:
    return "would be accepted" if args.dry_run else "pushed" if result.created else "was there already"


def _name(version: AdapterVersion) -> str:
    return f"{version.tenant}/{version.name}"
