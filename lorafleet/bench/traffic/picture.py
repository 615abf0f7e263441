"""What a picture of real traffic has beside the bars and curves of all loads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lorafleet.bench.statistics import CURVE_POINTS

Draw = Callable[[Any], None]  # on an axis of matplotlib


def panels_of(rows: Sequence[Mapping[str, Any]]) -> list[Draw]:
    """First tokens by crowd; pauses over time; and the durations of steps by size, where there is a trace."""
    traffic = [row for row in rows if "crowds" in row]
    panels: list[Draw] = []
    if traffic:
        panels += [partial(_crowds, traffic), partial(_pauses, traffic)]
    traced = [row for row in traffic if row.get("steps", {}).get("by_rows")]
    return [*panels, partial(_steps, traced)] if traced else panels


def _crowds(rows: Sequence[Mapping[str, Any]], axis: Any) -> None:
    for row in rows:
        for crowd, spread in row["crowds"].items():
            if spread:
                axis.plot(spread["curve"], CURVE_POINTS, marker=".", label=f"{row['workload']}: {crowd}")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("time to first token by what the adapter did, ms")
    axis.set_ylabel("% below")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=6)


def _pauses(rows: Sequence[Mapping[str, Any]], axis: Any) -> None:
    """A dot is a moment, as large as the number of streams that stood still."""
    for row in rows:
        pauses = row["pauses"]
        axis.scatter(
            [pause["at_s"] for pause in pauses],
            [pause["ms"] for pause in pauses],
            [10 + 4 * pause["streams"] for pause in pauses],
            alpha=0.5,
            label=f"{row['workload']}: {row['pause_moments']}",
        )
    axis.set_xlabel("pauses of streams, s after the start")
    axis.set_ylabel("ms")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=7)


def _steps(rows: Sequence[Mapping[str, Any]], axis: Any) -> None:
    """The median and the longest of each size."""
    names = list(dict.fromkeys(name for row in rows for name in row["steps"]["by_rows"]))
    names.sort(key=lambda name: (name.startswith("over"), int(name.split()[1])))
    for number, row in enumerate(rows):
        found = [(names.index(name), of) for name, of in row["steps"]["by_rows"].items()]
        for of, marker in (("p50", "o"), ("p99", "x"), ("max", "_")):
            axis.plot(
                [place for place, _ in found],
                [step["ms"][of] for _, step in found],
                marker,
                color=f"C{number}",
                label=f"{row['workload']}: {of}",
            )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_ylabel("ms a step")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=6)
