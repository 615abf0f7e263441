"""Results as text: the sum of the four layers at every point, or the rows as they are."""

from collections import defaultdict
from math import exp, fsum, log
from typing import Any

Rows = list[dict[str, Any]]


def layer_sums(rows: Rows) -> dict[tuple[int, int, int], dict[str, float | None]]:
    """(rank, tokens, adapters) -> us a decoder layer; None where a layer has no value.

    Points that some layers lack, as after a run that was cut short, are left out.
    """
    layers = {row["layer"] for row in rows}
    points: dict[tuple[int, int, int], Rows] = defaultdict(list)
    for row in rows:
        points[row["rank"], row["tokens"], row["adapters"]].append(row)
    return {
        point: {name: _sum(rows_there, name) for name in _times(rows)}
        for point, rows_there in points.items()
        if len(rows_there) == len(layers)
    }


def speedup(rows: Rows, other: str) -> float | None:
    """Geometric mean of other / ours over all rows that have the other's time."""
    ratios = [log(row[other] / row["ours_us"]) for row in rows if row.get(other)]
    return exp(fsum(ratios) / len(ratios)) if ratios else None


def table(rows: Rows) -> str:
    if rows[0].get("op") not in ("lora_linear", "vllm_linear"):
        return "".join(
            " ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()) + "\n"
            for row in rows
        )
    lines = ["rank tokens adapters " + " ".join(_times(rows))]
    for (rank, tokens, adapters), sums in layer_sums(rows).items():
        values = " ".join("-" if value is None else f"{value:.1f}" for value in sums.values())
        lines.append(f"{rank} {tokens} {adapters} {values}")
    for other in ("peer_us", "peer_tuned_us"):
        ratio = speedup(rows, other)
        if ratio is not None:
            worst = min(row[other] / row["ours_us"] for row in rows if row.get(other))
            lines.append(f"{other} / ours_us: geometric mean {ratio:.2f}, least {worst:.2f}")
    return "\n".join(lines) + "\n"


def _times(rows: Rows) -> list[str]:
    return [name for name in rows[0] if name.endswith("_us")]


def _sum(layers: Rows, name: str) -> float | None:
    values = [row[name] for row in layers if row.get(name) is not None]
    return fsum(values) if len(values) == len(layers) else None
