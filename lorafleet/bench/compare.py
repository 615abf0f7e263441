"""Two result files side by side, such as the whole product's and the engine's alone. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from lorafleet.bench.rows import Row, rounded


def compare(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each that both have (by workload, adapters and unit); ratio: first over second."""
    others = {_key(row): row["ours"] for row in second}
    return [
        {
            "workload": row["workload"],
            "adapters": row["adapters"],
            "unit": row["unit"],
            "first": row["ours"],
            "second": other,
            "ratio": rounded(row["ours"] / other) if row["ours"] is not None and other else None,
        }
        for row in first
        if (other := others.get(_key(row))) is not None
    ]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["workload"], row["adapters"], row["unit"]
