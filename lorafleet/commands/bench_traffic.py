"""`lorafleet bench preset real-traffic`: its settings, and the way to its measurements."""

import argparse
from collections.abc import AsyncIterator

from lorafleet.bench.rows import Row
from lorafleet.bench.session import Session
from lorafleet.bench.traffic.load import Schedule, Traffic
from lorafleet.bench.traffic.measure import real_traffic
from lorafleet.bench.traffic.step_lines import StepLines
from lorafleet.commands.parsing import count, seconds

NAME = "real-traffic"
DRAWS = Traffic().draws


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the preset real-traffic alone."""
    whole = Schedule()
    group = parser.add_argument_group(NAME)
    group.add_argument(
        "--at",
        nargs="+",
        type=float,
        default=whole.at,
        metavar="X",
        help="times the capacity at which requests arrive, one row each (default: 0.5 0.7 0.9 2)",
    )
    group.add_argument(
        "--capacity",
        type=float,
        default=0.0,
        metavar="R",
        help="requests a second; default: answers a second while --under-way requests are under way",
    )
    group.add_argument(
        "--capacity-requests",
        type=count,
        default=whole.capacity_requests,
        metavar="N",
        help="requests that the capacity is measured with (default: %(default)s)",
    )
    group.add_argument(
        "--under-way", type=count, default=whole.under_way, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument(
        "--seconds",
        type=seconds,
        default=whole.seconds,
        metavar="S",
        help="during which requests arrive (default: %(default)g)",
    )
    group.add_argument(
        "--overload-seconds",
        type=seconds,
        default=whole.overload_seconds,
        metavar="S",
        help="the same where more arrive than the capacity (default: %(default)g)",
    )
    group.add_argument(
        "--pause-ms",
        type=seconds,
        default=1e3 * whole.pause_s,
        metavar="MS",
        help="longer pauses of streams are looked into (default: %(default)g)",
    )
    add_draws(group, default=DRAWS)


def add_draws(parser: argparse._ActionsContainer, default: int) -> None:
    parser.add_argument(
        "--draws",
        type=count,
        default=default,
        metavar="N",
        help="real-traffic draws so many adapters, then the same again: fewer of them must be in the store "
        "(default: %(default)s)",
    )


def measure(args: argparse.Namespace, session: Session) -> AsyncIterator[Row]:
    """Raises BenchError."""
    schedule = Schedule(
        at=tuple(args.at),
        capacity=args.capacity,
        capacity_requests=args.capacity_requests,
        under_way=args.under_way,
        seconds=args.seconds,
        overload_seconds=args.overload_seconds,
        pause_s=args.pause_ms / 1e3,
    )
    traffic = Traffic(draws=args.draws).shrunk(args.shrink)
    return real_traffic(session, traffic, schedule, StepLines(args.step_trace) if args.step_trace else None)
