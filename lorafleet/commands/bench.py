"""`lorafleet bench`: how fast a running scheduler is, or one started here, or an engine alone."""

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from lorafleet.bench.adapters import AdapterMaker, Shapes, make_folders, push, put_into_store
from lorafleet.bench.compare import compare
from lorafleet.bench.errors import BenchError
from lorafleet.bench.plot import plot
from lorafleet.bench.render import comparison_table
from lorafleet.bench.shapes import SHAPES, write_shapes
from lorafleet.bench.traffic.load import Traffic
from lorafleet.bench.workload import Names
from lorafleet.commands import bench_runs, bench_traffic, connection
from lorafleet.commands.parsing import Subparsers, add_command, add_group, count
from lorafleet.terminal import ProgressBar, note, say, say_json, size

_PUSH_THREADS = 16


def add_parser(commands: Subparsers) -> None:
    group = add_group(
        commands,
        "bench",
        "measure how fast it is",
        "Measure a running scheduler (--target), services started on this machine (--local), or an engine\n"
        "alone in a process of its own (--in-process): the same requests, the same report.",
    )
    bench_runs.add_load(group)
    bench_runs.add_preset(group)
    _add_compare(group)
    _add_plot(group)
    _add_make_adapters(group)
    _add_shapes(group)


def _add_compare(group: Subparsers) -> None:
    parser = add_command(
        group,
        "compare",
        "two result files side by side",
        "Print the first file's figures over the second's, for the workloads that both have: for example\n"
        "the whole product's over the engine's alone.",
        "  lorafleet bench compare product.json in-process.json",
        _run_compare,
    )
    parser.add_argument("first", type=Path, metavar="FILE", help="results")
    parser.add_argument("second", type=Path, metavar="FILE", help="what they are divided by")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def _run_compare(args: argparse.Namespace) -> int:
    rows = compare(*(_results(file)["rows"] for file in (args.first, args.second)))
    if not rows:
        raise BenchError(
            f"no row is in both {args.first} and {args.second}: same workload, adapters and unit"
        )
    if args.json:
        say_json(rows)
    else:
        say(comparison_table(rows))
    return 0


def _add_plot(group: Subparsers) -> None:
    parser = add_command(
        group,
        "plot",
        "a picture of a result file",
        "Draw a result file: figures beside the peer's, and latencies. Needs matplotlib.",
        "  lorafleet bench plot d1.json --png d1.png",
        _run_plot,
    )
    parser.add_argument("results", type=Path, metavar="FILE", help="what --json wrote")
    parser.add_argument("--png", type=Path, required=True, metavar="FILE", help="where the picture goes")


def _run_plot(args: argparse.Namespace) -> int:
    plot(_results(args.results), args.png)
    return 0


def _add_make_adapters(group: Subparsers) -> None:
    parser = add_command(
        group,
        "make-adapters",
        "random adapters to measure with",
        "Make adapters of one rank on all projections of every layer, those of each expert included, with\n"
        "random values that are the same each time: as PEFT folders (--folder), straight into a store\n"
        "(--store), or pushed to a scheduler (neither). They are called bench-0000 and so on, as\n"
        "`lorafleet bench` asks for them. With --real-traffic they are those that this preset draws, in its\n"
        "ranks (8, 16 and 32).",
        "  lorafleet bench make-adapters --model M --store S --count 128 --rank 16\n"
        "  lorafleet bench make-adapters --model M --store S --real-traffic --draws 2000\n"
        "  lorafleet bench make-adapters --model M --folder ./adapters --count 4\n"
        "  lorafleet bench make-adapters --model M --count 16 --target 127.0.0.1:50051",
        _run_make_adapters,
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="the base model; its config.json is read"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--count", type=count, metavar="N", help="how many, of one rank")
    which.add_argument("--real-traffic", action="store_true", help="those of `bench preset real-traffic`")
    bench_traffic.add_draws(parser, bench_traffic.DRAWS)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first (default: 0)")
    parser.add_argument(
        "--rank", type=count, default=16, metavar="R", help="their rank (default: %(default)s)"
    )
    parser.add_argument("--attention-only", action="store_true", help="on q, k, v and o alone")
    parser.add_argument("--adapter-prefix", default="bench-", metavar="TEXT", help="before the number")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--folder", type=Path, metavar="FOLDER", help="write PEFT folders into this one")
    where.add_argument("--store", metavar="STORE", help="put them into this store, a folder or redis://...")
    connection.add_arguments(parser)


def _run_make_adapters(args: argparse.Namespace) -> int:
    shapes = Shapes.of(args.model, attention_only=args.attention_only)
    numbers = {args.rank: list(range(args.first, args.first + (args.count or 0)))}
    if args.real_traffic:
        numbers = Traffic(draws=args.draws).named()
    bar, total, done = ProgressBar(), sum(map(len, numbers.values())), []

    def told(name: str) -> None:
        done.append(name)
        bar.update(f"{total} adapters", len(done) / total)

    made = 0
    for rank, some in numbers.items():
        maker = AdapterMaker.make(shapes, rank)
        _make_adapters(args, maker, some, told)
        made += maker.num_bytes * len(some)
    note(f"{total} adapters of {size(made)} together")
    return 0


def _make_adapters(
    args: argparse.Namespace, maker: AdapterMaker, numbers: Iterable[int], told: Callable[[str], None]
) -> None:
    names = Names(0, args.adapter_prefix)
    named = {number: str(names.adapter(number)) for number in numbers}
    if args.folder:
        make_folders(maker, args.folder, named, told)
    elif args.store:
        put_into_store(maker, args.store, args.model, named, told, min(_PUSH_THREADS, os.cpu_count() or 1))
    else:
        with connection.connect(args) as client:
            push(maker, client.adapters, named, told)


def _add_shapes(group: Subparsers) -> None:
    parser = add_command(
        group,
        "shapes",
        "a model folder without weights",
        f"Write a model folder for `--load-format dummy`: {', '.join(SHAPES)}. Its checkpoint takes no\n"
        "room, its tokenizer has one word for each id.",
        "  lorafleet bench shapes llama-3.1-8b ./llama",
        _run_shapes,
    )
    parser.add_argument("name", choices=list(SHAPES), help="whose shapes")
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--layers", type=count, metavar="N", help="so many, in place of the model's")


def _run_shapes(args: argparse.Namespace) -> int:
    write_shapes(args.name, args.folder, args.layers)
    note(f"{args.folder} has the shapes of {args.name}")
    return 0


def _results(file: Path) -> dict[str, list[dict[str, object]]]:
    try:
        results: dict[str, list[dict[str, object]]] = json.loads(file.read_text(encoding="utf-8"))
        results["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{file} is no result file: {error}") from error
    return results
