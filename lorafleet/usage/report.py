"""A report of usage as text, JSON or CSV."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields

from lorafleet.terminal import table
from lorafleet.usage.sums import Row, Sum

_COLUMNS = tuple(field.name for field in fields(Sum))
_TOKENS = {name: name if name == "answers" else f"{name}_tokens" for name in _COLUMNS}


def as_json(rows: Sequence[Row], by: Sequence[str], skipped: int) -> str:
    """`skipped`: lines that were no whole record."""
    document = {
        "rows": [_fields(row, by) for row in rows if row.seen],
        "ends_that_nobody_saw": [_fields(row, by) for row in rows if not row.seen],
        "skipped_lines": skipped,
    }
    return json.dumps(document, indent=1)


def as_csv(rows: Sequence[Row], by: Sequence[str]) -> str:
    """The table with a first line of names; `end_seen` is true or false."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*by, "outcome", "end_seen", *_TOKENS.values()], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(_fields(row, by) | {"end_seen": str(row.seen).lower()})
    return text.getvalue().rstrip("\n")


def as_text(rows: Sequence[Row], by: Sequence[str]) -> str:
    """Two tables: the second, where there is one, of answers whose end nobody saw."""
    seen, unseen = [row for row in rows if row.seen], [row for row in rows if not row.seen]
    parts = [_table(seen, by) if seen else "no answers"]
    if unseen:
        parts.append("ends that nobody saw, in no sum above:\n" + _table(unseen, by))
    return "\n\n".join(parts)


def _fields(row: Row, by: Sequence[str]) -> dict[str, object]:
    sums = {_TOKENS[name]: value for name, value in asdict(row.sum).items()}
    return dict(zip(by, row.values, strict=True)) | {"outcome": row.outcome} | sums


def _table(rows: Sequence[Row], by: Sequence[str]) -> str:
    lines = [(*(value or "-" for value in row.values), row.outcome, *astuple(row.sum)) for row in rows]
    total = (sum(getattr(row.sum, name) for row in rows) for name in _COLUMNS)
    return table((*by, "outcome", *_COLUMNS), [*lines, (*("" for _ in by), "all", *total)])
