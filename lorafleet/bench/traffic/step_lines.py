"""Reads the trace of steps that an executor writes with `--step-trace`, and counts its steps."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.bench.errors import BenchError
from lorafleet.bench.rows import Row, rounded
from lorafleet.bench.statistics import percentile

Line = dict[str, Any]

# Upper bounds of the classes that steps are counted in.
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MS = (5, 10, 20, 50, 100)


@dataclass(slots=True)
class StepLines:
    """Each step is read once: a trace of hours is long."""

    file: Path
    _offset: int = 0
    _lines: list[Line] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[Line]:
        """The steps that were over in that time (monotonic clock of this machine), those known now. Older
        ones are forgotten. Raises BenchError, OSError."""
        self._lines += self._new()
        first, last = (bisect_left(self._lines, at, key=_landed) for at in (start, end))
        found = self._lines[first:last]
        del self._lines[:first]
        return found

    def _new(self) -> Iterator[Line]:
        with self.file.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    return  # it is being written
                self._offset += len(text)
                try:
                    yield json.loads(text)
                except ValueError as error:
                    raise BenchError(f"{self.file} is no trace of steps: {error}") from error


def steps_row(steps: Sequence[Line]) -> Row:
    """How many there were of each size and duration, as {"to N rows": {count, ms, "to N ms"...}}."""
    by_rows: dict[str, list[Line]] = {}
    for step in sorted(steps, key=lambda step: int(step["rows"])):
        by_rows.setdefault(_class(step["rows"], ROWS, "rows"), []).append(step)
    return {
        "count": len(steps),
        "captured": sum(step["captured"] > 0 for step in steps),
        "page_ins": sum(step["page_ins"] for step in steps),
        "preempted": sum(step["preempted"] for step in steps),
        "gc_ms": rounded(sum(step.get("gc_ms", 0.0) for step in steps)),
        "by_rows": {name: _class_row(members) for name, members in by_rows.items()},
    }


def _class_row(steps: Sequence[Line]) -> Row:
    times = sorted(step["ms"] for step in steps)
    counts = Counter(_class(time, MS, "ms") for time in times)
    spread = {name: rounded(percentile(times, at)) for name, at in (("p50", 50), ("p99", 99), ("max", 100))}
    captured = sum(step["captured"] > 0 for step in steps)
    return {"count": len(steps), "captured": captured, "ms": spread, **counts, **_device(steps)}


def _device(steps: Sequence[Line]) -> Row:
    """The share of the time that the device worked, where it is known."""
    total = sum(step["ms"] for step in steps)
    busy = [step["device_ms"] for step in steps if "device_ms" in step]
    return {"device_share": rounded(sum(busy) / total, 3)} if busy and total else {}


def _class(value: float, bounds: Sequence[int], unit: str) -> str:
    bound = next((bound for bound in bounds if value <= bound), None)
    return f"over {bounds[-1]} {unit}" if bound is None else f"to {bound} {unit}"


def _landed(step: Line) -> float:
    return float(step["landed"])
