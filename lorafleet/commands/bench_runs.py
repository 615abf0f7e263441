"""`lorafleet bench load` and `preset`: plays requests and reports on them."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet.bench import arrivals, lengths, measures, popularity, presets
from lorafleet.bench.errors import BenchError
from lorafleet.bench.plot import plot
from lorafleet.bench.render import load_table, rows_table
from lorafleet.bench.requests import Lane, Request
from lorafleet.bench.results import head, write
from lorafleet.bench.rows import OUTPUT, Row, details, make_row, peer_figures, with_bases
from lorafleet.bench.session import Played, Session
from lorafleet.bench.statistics import summarize
from lorafleet.bench.system import session, started
from lorafleet.bench.workload import Description, Names, generate, read_trace
from lorafleet.commands import bench_system, bench_traffic
from lorafleet.commands.parsing import Subparsers, add_command, count
from lorafleet.terminal import note, say

INTERRUPTED = 130


@dataclass(slots=True)
class Outcome:
    """What is measured so far, also in the file that --json names."""

    args: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    session: Session | None = None

    def add(self, *rows: Row) -> None:
        self.rows = with_bases([*self.rows, *rows])
        if self.args.json:
            write(self.args.json, self._whole())

    def add_interrupted(self) -> None:
        """What the play that was cut off had seen."""
        if self.session and self.session.current.records:
            summary = summarize(self.session.current)
            label = f"{self.session.label}, interrupted"
            row = make_row(label, summary.adapters, summary.output_tokens_per_s, OUTPUT, None)
            self.add(row | details(summary, None))

    def tell(self, table: str) -> None:
        say(table)
        if self.args.png:
            plot(self._whole(), self.args.png)

    def _whole(self) -> Row:
        peer = {"peer": str(peer_figures()["source"])}
        return {**head("lorafleet", self.args.revision), **peer, "rows": self.rows}


Work = Callable[[Session, Outcome], Awaitable[None]]


def add_load(group: Subparsers) -> None:
    parser = add_command(
        group,
        "load",
        "one load, as you describe it",
        "Send requests with random token ids and report latency, throughput and what the slots did. All at\n"
        "once, or as they arrive with --rate; answers are greedy and have their full length.",
        "  lorafleet bench load --requests 64 --adapters 8 --popularity distinct\n"
        "  lorafleet bench load --rate 10 --requests 600 --popularity zipf:1.2 --adapters 100\n"
        "  lorafleet bench load --rate 10 --burstiness 0.5 --prompt-tokens uniform:32:512\n"
        "  lorafleet bench load --trace day.jsonl --json day.json --png day.png\n"
        "  lorafleet bench load --in-process --model M --store S --executor-args '--max-loras 16'",
        run_load,
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--requests", type=count, default=64, metavar="N", help="how many (default: %(default)s)"
    )
    load.add_argument(
        "--rate", type=float, metavar="R", help="requests a second on average; default: all at once"
    )
    load.add_argument(
        "--arrivals",
        choices=arrivals.KINDS,
        help="default: poisson with --rate (gamma with --burstiness, too), else at-once",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gaps between arrivals: below 1 in bursts, above 1 more regular (default: 1)",
    )
    load.add_argument("--max-concurrency", type=count, metavar="N", help="never more than N under way")
    load.add_argument(
        "--prompt-tokens", default="128", metavar="L", help=f"{lengths.FORMS} (default: %(default)s)"
    )
    load.add_argument(
        "--output-tokens", default="128", metavar="L", help=f"{lengths.FORMS} (default: %(default)s)"
    )
    load.add_argument(
        "--popularity", default="none", metavar="P", help=f"{popularity.FORMS} (default: %(default)s)"
    )
    load.add_argument(
        "--adapters", type=int, default=0, metavar="N", help="how many there are to choose from"
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help='instead: JSON lines {"at": s, "prompt_tokens": n, "output_tokens": n, "adapter": ref or null}',
    )
    load.add_argument(
        "--warm-up",
        type=int,
        default=4,
        metavar="N",
        help="requests before, not counted (default: %(default)s)",
    )
    bench_system.add_arguments(parser)


def add_preset(group: Subparsers) -> None:
    names = [*presets.PRESETS, *measures.MEASURES, bench_traffic.NAME]
    parser = add_command(
        group,
        "preset",
        "the loads that LoraFleet is measured with",
        "Measure ready-made loads, one row each, beside the figures of vLLM on an H100. The adapters must\n"
        "be there (see make-adapters), the executor with --prefix-cache false, and with so many slots:\n"
        "  d1, d2, d3, d4      64 and more: decoding, 256 requests, one request, prefill\n"
        "  high-ranks          32 of rank 64: decoding; 32 adapters of rank 64, then 32 of 16, 32 of 32\n"
        "  experts             8: decoding by a model with experts, whose adapters are on all projections\n"
        "  experts-attention   64: the same, with adapters on attention alone\n"
        "  d2-paged            16, and host memory for 128 adapters; not used since the executor's start\n"
        "  page-in-stall       16, and host memory for 108: what page-ins do to 64 running streams\n"
        "  slow-store          8, --max-model-len 8192, a slow store: 16 streams beside loads\n"
        "  first-use           8, adapters 0 to 5 of the ranks 8, 8, 16, 16, 64, 64; nothing asked before\n"
        "  arriving-prompts    8 and more: what short prompts do to 64 running streams\n"
        "  no-cliff            8: first tokens with 8, 12, 16 and 32 adapters\n"
        "  base-traffic        8, and --max-model-len 8192: what resident adapters cost others\n"
        "  real-traffic        any of rank 32: 1,000 adapters, prompts of all lengths, up to overload",
        "  lorafleet bench preset d1 d3 --json d1.json --png d1.png\n"
        "  lorafleet bench preset d1 --local --model M --store S --executor-args '--max-loras 64'\n"
        "  lorafleet bench preset d1 --shrink 16\n"
        "  lorafleet bench preset real-traffic --local --model M --store S --step-trace steps --at 0.7 2",
        run_preset,
    )
    parser.add_argument("preset", nargs="+", choices=names, metavar="PRESET", help=", ".join(names))
    parser.add_argument(
        "--shrink", type=count, default=1, metavar="N", help="divide lengths by N, to try it out (default: 1)"
    )
    bench_traffic.add_arguments(parser)
    bench_system.add_arguments(parser)


def run_load(args: argparse.Namespace) -> int:
    outcome = Outcome(args)
    try:
        return _measure(args, outcome, _load)
    finally:
        if outcome.rows and "requests" in outcome.rows[-1]:
            outcome.tell(load_table(outcome.rows[-1]))


def run_preset(args: argparse.Namespace) -> int:
    outcome = Outcome(args)
    try:
        return _measure(args, outcome, _presets)
    finally:  # what ends it early takes nothing of what is measured already
        if outcome.rows:
            outcome.tell(rows_table(outcome.rows))


async def _load(current: Session, outcome: Outcome) -> None:
    args = outcome.args
    requests = _requests(args, current.names)
    warm_up = [
        Request(0.0, each.prompt_token_ids[::-1], each.max_new_tokens, each.adapter) for each in requests
    ]
    if args.warm_up:
        await current.run("warming up", [Lane("warm-up", warm_up[: args.warm_up])])
    played = await current.run("load", [Lane("load", requests, args.max_concurrency)])
    outcome.add(_load_row(played))
    if not outcome.rows[-1]["whole"]:
        errors = ", ".join(f"{count} x {reason}" for reason, count in outcome.rows[-1]["errors"].items())
        raise BenchError(f"no request was answered: {errors}")


async def _presets(current: Session, outcome: Outcome) -> None:
    shrink = outcome.args.shrink
    for name in outcome.args.preset:
        if name == bench_traffic.NAME:
            async for measured in bench_traffic.measure(outcome.args, current):
                outcome.add(measured)
        if name in measures.MEASURES:
            async for measured in measures.MEASURES[name](current, measures.shrunk(shrink)):
                outcome.add(measured)
        for case in presets.PRESETS.get(name, ()):
            if row := await presets.run_case(presets.shrunk(case, shrink), current):
                outcome.add(row)


def _measure(args: argparse.Namespace, outcome: Outcome, work: Work) -> int:
    """The exit status. An interrupt ends it with what was measured until then."""
    bench_system.check_results(args)
    with started(bench_system.config(args), note) as system:

        async def measure() -> None:
            async with session(system, note) as (current, ready_s):
                outcome.session = current
                if ready_s is not None:
                    outcome.add(make_row("start to ready", 0, ready_s, "s", None))
                await work(current, outcome)

        try:
            asyncio.run(measure())
        except KeyboardInterrupt:
            note("interrupted: this is what was measured so far")
            outcome.add_interrupted()
            return INTERRUPTED
    return 0


def _load_row(played: Played) -> Row:
    summary = played.summary()
    row = make_row("load", summary.adapters, summary.output_tokens_per_s, OUTPUT, played.slots)
    return row | details(summary, played.slots, played.cpu)


def _requests(args: argparse.Namespace, names: Names) -> list[Request]:
    if args.trace:
        return read_trace(args.trace, names, args.seed)
    default = "at-once" if args.rate is None else "poisson" if args.burstiness == 1.0 else "gamma"
    description = Description(
        requests=args.requests,
        prompt=lengths.Lengths.parse(args.prompt_tokens),
        output=lengths.Lengths.parse(args.output_tokens),
        popularity=args.popularity,
        adapters=args.adapters,
        arrivals=args.arrivals or default,
        rate=args.rate or 0.0,
        burstiness=args.burstiness,
    )
    return generate(description, names, args.seed)
