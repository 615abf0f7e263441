"""What commands write: results to stdout, everything else to stderr."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

_BAR_WIDTH = 30


def say(text: str, end: str = "\n") -> None:
    """A result, or a piece of one, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_json(value: Any) -> None:
    """A result of dataclasses, lists, dicts and plain values, as one JSON document."""
    say(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is no plain value")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of equal width under a head; numbers to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    numeric = [bool(rows) and all(isinstance(row[c], int | float) for row in rows) for c in range(len(head))]
    lines = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def size(num_bytes: int) -> str:
    """As "3.4 MB"."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def short(digest: str) -> str:
    """A digest as tables show it: "sha256:" and 12 digits."""
    return digest[:19] or "-"


class ProgressBar:
    """A bar on stderr; where that is no terminal, one line for every finished label."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._label = ""
        self._done = False

    def update(self, label: str, fraction: float) -> None:
        """fraction: 0 to 1. A new label begins a new bar."""
        if label == self._label and self._done:
            return
        if self._live and self._label and label != self._label and not self._done:
            sys.stderr.write("\n")
        self._label, self._done = label, fraction >= 1.0
        if self._live:
            bar = ("█" * round(fraction * _BAR_WIDTH)).ljust(_BAR_WIDTH, "░")
            sys.stderr.write(f"\r{label} {bar} {fraction:4.0%}" + ("\n" if self._done else ""))
        elif self._done:
            sys.stderr.write(f"{label} done\n")
        sys.stderr.flush()

    def bytes(self, label: str) -> Callable[[int, int], None]:
        """A callback for transfers: (bytes so far, bytes in all)."""
        return lambda done, total: self.update(f"{label} ({size(total)})", done / total if total else 1.0)
