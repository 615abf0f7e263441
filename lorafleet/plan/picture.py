"""The curve around a plan, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafleet.bench.plot import check_pictures
from lorafleet.plan.search import Fleet, Goals
from lorafleet.terminal import size

_PANELS = (("executors", "executors"), ("slots", "slots of each"), ("host_bytes", "host memory of each"))


def draw(rows: Sequence[Mapping[str, Any]], best: Fleet | None, goals: Goals, png: Path) -> None:
    """p99 TTFT over executors, slots and host memory, with the other two as they are in the best fleet; each
    number of slots has a line of its own over executors. Raises BenchError without matplotlib."""
    check_pictures()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(15, 4), sharey=True)
    for axis, (key, label) in zip(axes, _PANELS, strict=True):
        for name, line in _lines(rows, best, key):
            places = [row[key] for row in line]
            axis.plot(places, [1e3 * row["ttft_p99_s"] for row in line], marker="o", label=name)
        axis.axhline(1e3 * goals.ttft_p99_s, linestyle="--", color="black", linewidth=1, label="goal")
        axis.set_xlabel(label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_yscale("log")
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=7)
    axes[2].xaxis.set_major_formatter(lambda value, _: size(int(value)))
    axes[0].set_ylabel("p99 TTFT, ms")
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def _lines(
    rows: Sequence[Mapping[str, Any]], best: Fleet | None, key: str
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The lines by name, in the order of `key`."""
    if key == "executors":
        slots = sorted({row["slots"] for row in rows})
        ample = {
            (row["slots"], row["executors"]): row for row in sorted(rows, key=lambda row: row["host_bytes"])
        }
        found = [
            (f"{count} slots", [row for row in ample.values() if row["slots"] == count]) for count in slots
        ]
    else:
        fixed = [name for name, _ in _PANELS if name != key]
        alike = [row for row in rows if best and all(row[name] == getattr(best, name) for name in fixed)]
        found = [("the rest as in the plan", alike)]
    return [(name, sorted(line, key=lambda row: row[key])) for name, line in found if line]
