"""Plots from result files. matplotlib is needed here and nowhere else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.bench.table import Rows, layer_sums

_DENSE = {
    "peer_us": "vLLM 0.24, default",
    "peer_tuned_us": "vLLM 0.24, tuned",
    "ours_us": "LoraFleet",
    "floor_us": "bytes at copy rate",
}
_EXPERTS = {"peer_us": "vLLM 0.24", "ours_us": "LoraFleet", "floor_us": "bytes at copy rate"}
_FP8 = {
    "peer_us": "vLLM 0.24, FP8 x FP8",
    "bf16_us": "bfloat16",
    "w8a8_us": "FP8 x FP8",
    "fp8_us": "FP8 weights",
    "bf16_floor_us": "bytes at copy rate, bfloat16",
    "fp8_floor_us": "bytes at copy rate, FP8",
}


@dataclass(frozen=True, slots=True)
class _Panel:
    """us by (tokens, adapters), a line each; a line with gaps is left out."""

    title: str
    unit: str
    points: Sequence[tuple[int, int]]
    lines: dict[str, list[Any]]


def plot(results: dict[str, Any], png: Path) -> None:
    """One panel a rank (lora_linear: us a decoder layer) or shape (fused_moe_lora), one for lora_fp8."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    op = results["rows"][0].get("op")
    panels = list({"fused_moe_lora": _experts, "lora_fp8": _fp8}.get(op, _dense)(results["rows"]))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, 3.4 * len(panels)), squeeze=False)
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        for label, values in panel.lines.items():
            if None not in values:
                axis.plot(range(len(panel.points)), values, marker="o", label=label)
        axis.set_yscale("log")
        axis.set_xticks(range(len(panel.points)), [f"{tokens}\n{loras}" for tokens, loras in panel.points])
        axis.set_ylabel(panel.unit)
        axis.set_title(f"{panel.title}, {results['gpu']}")
        axis.grid(True, alpha=0.3)
    axes[-1, 0].set_xlabel("tokens over distinct adapters")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def _dense(rows: Rows) -> Iterator[_Panel]:
    sums = layer_sums(rows)
    for rank in sorted({rank for rank, _, _ in sums}):
        points = sorted(point for point in sums if point[0] == rank)
        lines = {label: [sums[point][name] for point in points] for name, label in _DENSE.items()}
        title = f"rank {rank}: shrink + expand"
        yield _Panel(title, "us a decoder layer", [point[1:] for point in points], lines)


def _experts(rows: Rows) -> Iterator[_Panel]:
    for shape in dict.fromkeys(row["shape"] for row in rows):
        title = f"{shape}, rank 16: alignment + w13 + w2"
        yield _panel(title, "us a layer", [row for row in rows if row["shape"] == shape], _EXPERTS)


def _fp8(rows: Rows) -> Iterator[_Panel]:
    chosen = [row for row in rows if row["block_n"] is None]
    yield _panel("gate_up of Llama-3.1-8B, rank 16: expand", "us", chosen, _FP8)


def _panel(title: str, unit: str, rows: Rows, names: dict[str, str]) -> _Panel:
    points = [(row["tokens"], row["adapters"]) for row in rows]
    return _Panel(title, unit, points, {label: [row[name] for row in rows] for name, label in names.items()})
