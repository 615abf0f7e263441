"""Rows as a table, and the digits that their figures are worth."""

from collections.abc import Sequence
from typing import Any

COLUMNS = {
    "scenario": "scenario",
    "policy": "policy",
    "executors": "executors",
    "adapters": "adapters",
    "slots": "slots",
    "rate": "rate",
    "seed": "seed",
    "requests": "requests",
    "answered": "answered",
    "ttft_p50_s": "ttft p50, s",
    "ttft_p99_s": "ttft p99, s",
    "token_ms_p50": "ms a token",
    "tokens_s": "tok/s",
    "page_ins_per_request": "page-ins a request",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row; the worst of several seeds has "worst" in place of a seed. Who had no first token, as
    those that were refused or waited to the end, is in no time of a row: `answered` tells of them."""
    lines = [list(COLUMNS.values()), *([_cell(key, row[key]) for key in COLUMNS] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return "".join(f"{line.rstrip()}\n" for line in padded)


def _cell(key: str, value: object) -> str:
    if key == "seed" and value == -1:
        return "worst"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def rounded(value: float) -> float:
    """To the four digits that a simulated figure is worth."""
    return float(f"{value:.4g}")
