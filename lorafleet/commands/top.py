"""`lorafleet top`: executors, slots, queues, hit rates and page-in times, live."""

import argparse
import datetime
import shutil
import sys
import time
from collections.abc import Sequence

from lorafleet.commands import connection, parsing
from lorafleet.commands.parsing import Subparsers
from lorafleet.results import Executor, Fleet
from lorafleet.terminal import say, say_json, short, table

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, without a cursor
_BAR_WIDTH = 10


def add_parser(commands: Subparsers) -> None:
    parser = parsing.add_command(
        commands,
        "top",
        "watch executors, slots and queues",
        "A live view of what a scheduler knows of its executors. Hits and rates are of the time between two\n"
        "pictures. Ctrl-C ends it. Needs the right operate.",
        "  lorafleet top\n  lorafleet top --interval 5\n  lorafleet top --once --json",
        run,
    )
    parsing.add_json(parser)
    parser.add_argument(
        "--interval",
        type=parsing.seconds,
        default=1.0,
        metavar="SECONDS",
        help="between pictures (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="one picture, and end")
    connection.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    live = sys.stdout.isatty() and not args.once and not args.json
    before: tuple[Fleet, float] | None = None
    with connection.connect(args) as client:
        try:
            if live:
                say(_ENTER, end="")
            for fleet in client.watch_fleet(args.interval):
                now = time.monotonic()
                if args.json:
                    say_json(fleet)
                else:
                    lines = render(fleet, before, now, datetime.datetime.now())
                    say(_screen(lines) if live else "\n".join(lines), end="" if live else "\n")
                if args.once:
                    return 0
                before = (fleet, now)
        except KeyboardInterrupt:
            return 0
        finally:
            if live:
                say(_LEAVE, end="")
    return 0


def _screen(lines: Sequence[str]) -> str:
    """The picture in place of the last one, cut to the terminal."""
    width, height = shutil.get_terminal_size()
    return _HOME + "".join(f"{line[:width]}{_CLEAR_LINE}\n" for line in lines[: height - 1]) + _CLEAR_BELOW


def render(
    fleet: Fleet, before: tuple[Fleet, float] | None, now: float, clock: datetime.datetime
) -> list[str]:
    """The picture. `before`: the last fleet and when it was shown, on the clock of `now`. Pure."""
    seconds = now - before[1] if before else 0.0
    old = {executor.name: executor for executor in before[0].executors} if before else {}
    ready = sum(executor.state == "ready" for executor in fleet.executors)
    running = sum(executor.running for executor in fleet.executors)
    lines = [
        f"lorafleet {clock:%H:%M:%S}   {ready} of {len(fleet.executors)} executors ready   "
        f"{running} running   {fleet.waiting} waiting for {fleet.groups} versions",
        "",
    ]
    rows = [_row(executor, old.get(executor.name), seconds) for executor in fleet.executors]
    lines += table(_HEAD, rows).splitlines()
    lines += [f"  {executor.name}: {executor.detail}" for executor in fleet.executors if executor.detail]
    if fleet.queues:
        lines += ["", "longest queues"]
        lines += [
            f"  {waiting:6d}  {short(digest) if digest else 'base'}" for digest, waiting in fleet.queues
        ]
    return lines


_HEAD = (
    "EXECUTOR",
    "STATE",
    "SEATS",
    "",
    "SLOTS",
    "",
    "HOST",
    "REQ/S",
    "SLOT HITS",
    "HOST HITS",
    "PAGE-IN",
    "MAX",
)


def _row(executor: Executor, old: Executor | None, seconds: float) -> tuple[str, ...]:
    slot, host, missed = _hits(executor, old)
    requests = slot + host + missed
    marks = {
        "cordoned": executor.cordoned,
        "on trial": executor.on_trial,
        "leaving": executor.leaving,
        "warming up": executor.seat_limit > 0,
        "tripped": executor.tripped,
    }
    state = ", ".join((executor.state, *(mark for mark, is_so in marks.items() if is_so)))
    return (
        executor.name,
        state,
        f"{executor.running}/{executor.max_seats}",
        _bar(executor.running, executor.max_seats),
        f"{len(executor.resident)}/{executor.max_loras}",
        _bar(len(executor.resident), executor.max_loras),
        str(executor.in_host),
        f"{requests / seconds:.1f}" if seconds else "-",
        _percent(slot, requests),
        _percent(host, requests),
        _milliseconds(executor.page_in_mean),
        _milliseconds(executor.page_in_max),
    )


def _hits(executor: Executor, old: Executor | None) -> tuple[int, int, int]:
    """Since the picture before; since the scheduler's start in the first one, and after its restart."""
    if old is None or old.slot_hits > executor.slot_hits or old.misses > executor.misses:
        return executor.slot_hits, executor.host_hits, executor.misses
    return (
        executor.slot_hits - old.slot_hits,
        executor.host_hits - old.host_hits,
        executor.misses - old.misses,
    )


def _bar(used: int, total: int) -> str:
    filled = round(_BAR_WIDTH * used / total) if total else 0
    return ("█" * filled).ljust(_BAR_WIDTH, "░")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds else "-"
