"""Plots from result files. matplotlib is needed here and nowhere else."""

from pathlib import Path
from typing import Any

from kernels.bench.table import layer_sums

_LINES = (
    ("peer_us", "vLLM 0.24, default"),
    ("peer_tuned_us", "vLLM 0.24, tuned"),
    ("ours_us", "LoraFleet"),
    ("floor_us", "bytes at copy rate"),
)


def plot(results: dict[str, Any], png: Path) -> None:
    """One panel a rank: us a decoder layer (sum of its four layers) at every (tokens, adapters)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sums = layer_sums(results["rows"])
    ranks = sorted({rank for rank, _, _ in sums})
    figure, axes = pyplot.subplots(len(ranks), 1, figsize=(11, 3.4 * len(ranks)), squeeze=False)
    for rank, axis in zip(ranks, axes[:, 0], strict=True):
        points = sorted(point for point in sums if point[0] == rank)
        for name, label in _LINES:
            values = [sums[point][name] for point in points]
            if None not in values:
                axis.plot(range(len(points)), values, marker="o", label=label)
        axis.set_yscale("log")
        axis.set_xticks(range(len(points)), [f"{tokens}\n{adapters}" for _, tokens, adapters in points])
        axis.set_ylabel("us a decoder layer")
        axis.set_title(f"rank {rank}: shrink + expand, {results['gpu']}")
        axis.grid(True, alpha=0.3)
    axes[-1, 0].set_xlabel("tokens over distinct adapters")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(png, dpi=110)
