"""What commands write: results to stdout, everything else to stderr."""

import argparse
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest
from typing import Any

_BAR_WIDTH = 30
_PAGE_ROWS = 500
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


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


def say_json_list(values: Iterable[Any]) -> None:
    """Does what say_json does with a list, one value at a time."""
    empty = True
    for value in values:
        text = json.dumps(value, indent=2, default=_plain, ensure_ascii=False)
        say(("[" if empty else ",") + "\n" + textwrap.indent(text, "  "), end="")
        empty = False
    say("[]" if empty else "\n]")


def say_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Says what `table` gives, for any number of rows: the first page of them decides how wide columns are at
    least."""
    pages = iter(rows)
    widths: list[int] = []
    while (page := list(islice(pages, _PAGE_ROWS))) or not widths:
        say(table(head if not widths else None, page, widths))
        widths = widths or _widths([list(head), *([str(cell) for cell in row] for row in page)])


def table(
    head: Sequence[str] | None, rows: Sequence[Sequence[object]], min_widths: Sequence[int] = ()
) -> str:
    """Columns of equal width under a head, if there is one; numbers to the right."""
    cells = [*([list(head)] if head else []), *([str(cell) for cell in row] for row in rows)]
    widths = [max(pair) for pair in zip_longest(_widths(cells), min_widths, fillvalue=0)]
    numeric = [
        bool(rows) and all(isinstance(row[c], int | float) for row in rows) for c in range(len(widths))
    ]
    lines = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def size(num_bytes: int) -> str:
    """The size as "3.4 MB"."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def num_bytes(text: str) -> int:
    """The inverse: "3.4 MB" or "3400000". Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 100MB")
    return round(float(match[1]) * _UNITS[match[2]])


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
