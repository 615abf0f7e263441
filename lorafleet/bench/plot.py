"""Pictures of result files. matplotlib is needed here and nowhere else."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorafleet.bench.errors import BenchError
from lorafleet.bench.statistics import CURVE_POINTS
from lorafleet.bench.traffic.picture import panels_of

_BARS = (
    ("peer_default", "vLLM 0.24 on an H100, default", "C0"),
    ("peer_best", "vLLM 0.24 on an H100, at its best", "C1"),
    ("ours", "LoraFleet", "C2"),
)
_CURVES = (("ttft_ms", "time to first token"), ("itl_ms", "between tokens"))


def check_pictures() -> None:
    """Raises BenchError without matplotlib: to be asked before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise BenchError("pictures need matplotlib: pip install matplotlib")


def plot(results: Mapping[str, Any], png: Path) -> None:
    """A panel of bars for each unit, then one for each latency: what share of them is below how many ms. Real
    traffic has more of them.

    Raises BenchError without matplotlib.
    """
    check_pictures()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row["ours"] is not None]
    units = list(dict.fromkeys(row["unit"] for row in rows))
    curves = [entry for entry in _CURVES if any(row.get(entry[0]) for row in rows)]
    traffic = panels_of(rows)
    panels = len(units) + len(curves) + len(traffic)
    if not panels:
        raise BenchError("there is nothing to draw: the file has no rows with a figure")
    figure, axes = pyplot.subplots(panels, 1, figsize=(11, 3.6 * panels), squeeze=False)
    for unit, axis in zip(units, axes[:, 0], strict=False):
        _bars(axis, [row for row in rows if row["unit"] == unit], unit)
    for (key, label), axis in zip(curves, axes[len(units) :, 0], strict=False):
        _curves(axis, rows, key, label)
    for draw, axis in zip(traffic, axes[len(units) + len(curves) :, 0], strict=True):
        draw(axis)
    axes[0, 0].set_title(f"{results['gpu'] or 'no GPU'}, {results['command']}"[:110], fontsize=9)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], unit: str) -> None:
    shown = [bar for bar in _BARS if any(row[bar[0]] is not None for row in rows)]
    width = 0.8 / len(shown)
    for place, (name, label, color) in enumerate(shown):
        at = [index + place * width for index in range(len(rows))]
        axis.bar(at, [row[name] or 0 for row in rows], width, label=label, color=color)
    labels = [f"{row['workload']}\n{row['adapters']} adapters" for row in rows]
    middle = width * (len(shown) - 1) / 2
    axis.set_xticks([index + middle for index in range(len(rows))], labels, fontsize=7)
    axis.set_ylabel(unit)
    axis.grid(True, axis="y", alpha=0.3)
    axis.legend(fontsize=8)


def _curves(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, label: str) -> None:
    for row in rows:
        if spread := row.get(key):
            axis.plot(
                spread["curve"],
                CURVE_POINTS,
                marker=".",
                label=f"{row['workload']}, {row['adapters']} adapters",
            )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel(f"{label}, ms")
    axis.set_ylabel("% below")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=7)
