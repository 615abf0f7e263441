"""Moments in which streams stood still, and what the engine did then. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lorafleet.bench.requests import Record
from lorafleet.bench.rows import Row, rounded
from lorafleet.bench.statistics import inter_token_gaps
from lorafleet.bench.traffic.step_lines import Line

_STEP_FIELDS = (
    "step", "ms", "rows", "decode_rows", "adapters", "captured", "page_ins", "preempted", "waiting_for_slot",
    "waiting_for_load", "loading", "gc_ms", "device_ms", "device_gap_ms", "cpu_ms", "faults", "switches",
    "host_ms",
)  # fmt: skip
_MOST_STEPS = 2


@dataclass(frozen=True, slots=True)
class Pause:
    """So many streams got no token for `longest` seconds at most, somewhere between `start` and `end`."""

    start: float
    end: float
    longest: float
    streams: int


def find_pauses(records: Iterable[Record], least_s: float) -> list[Pause]:
    """The gaps of at least so many seconds; those that overlap are one pause. In order of time."""
    gaps = sorted(
        (end - seconds, end)
        for each in records
        for end, seconds in inter_token_gaps(each)
        if seconds > least_s
    )
    pauses: list[Pause] = []
    for start, end in gaps:
        if pauses and start < pauses[-1].end:
            last = pauses.pop()
            longest = max(last.longest, end - start)
            pauses.append(Pause(last.start, max(last.end, end), longest, last.streams + 1))
        else:
            pauses.append(Pause(start, end, end - start, 1))
    return pauses


def pause_row(pause: Pause, started: float, steps: Sequence[Line]) -> Row:
    """`steps` is a whole trace: what of it was under way meanwhile, where the time of the host went (in
    milliseconds), and the longest of its steps. Without a trace there is only what streams saw."""
    row: Row = {
        "at_s": rounded(pause.start - started),
        "ms": rounded(1e3 * pause.longest),
        "from_first_to_last_ms": rounded(1e3 * (pause.end - pause.start)),
        "streams": pause.streams,
    }
    if not steps:
        return row
    during = [step for step in steps if step["landed"] > pause.start and step["at"] < pause.end]
    host: Counter[str] = Counter()
    for step in during:
        host.update(step["host_ms"])
    device = [step["device_ms"] for step in during if "device_ms" in step]
    longest = sorted(during, key=lambda step: float(step["ms"]), reverse=True)[:_MOST_STEPS]
    return row | {
        "steps": len(during),
        "host_ms": {part: rounded(ms) for part, ms in host.most_common() if ms >= 1},
        "device_ms": rounded(sum(device)) if device else None,
        "gc_ms": rounded(sum(step.get("gc_ms", 0.0) for step in during)),
        "longest_steps": [{name: step[name] for name in _STEP_FIELDS if name in step} for step in longest],
    }
