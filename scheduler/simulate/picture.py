"""Pictures of rows; matplotlib is needed here and nowhere else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafleet.bench.plot import check_pictures

_PANELS = (
    ("ttft_p99_s", "time to first token, p99, s"),
    ("tokens_s", "tokens a second"),
    ("page_ins_per_request", "page-ins a request"),
)


def draw(results: Mapping[str, Any], png: Path) -> None:
    """A panel for each of three figures, a bar for each scenario, rate and policy: the worst of its seeds.

    Raises BenchError without matplotlib.
    """
    check_pictures()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _told(results["rows"])
    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(11, 3.2 * len(_PANELS)), squeeze=False)
    labels = [f"{row['scenario']} {row['rate']:g}/s\n{row['policy']}" for row in rows]
    for (key, label), axis in zip(_PANELS, axes[:, 0], strict=True):
        axis.bar(range(len(rows)), [row[key] or 0 for row in rows])
        axis.set_xticks(range(len(rows)), labels, fontsize=7)
        axis.set_ylabel(label)
        axis.grid(True, axis="y", alpha=0.3)
    axes[0, 0].set_title(results["command"][:110], fontsize=9)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def _told(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The worst of several seeds, or else the only one."""
    last = {(row["scenario"], row["rate"], row["policy"]): row for row in rows}
    return list(last.values())
