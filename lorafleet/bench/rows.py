"""Results as rows of plain values, beside what the peer reached (peer.json)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from lorafleet.bench.slot_use import SlotUse
from lorafleet.bench.statistics import Spread, Summary

Row = dict[str, Any]

OUTPUT, INPUT, PER_TOKEN = "output tok/s", "input tok/s", "ms a token"


def value_of(summary: Summary, unit: str) -> float | None:
    """A summary's figure in one of the three units; None when nothing was answered."""
    if unit == PER_TOKEN:
        return summary.tpot_ms.p50 if summary.tpot_ms else None
    return summary.input_tokens_per_s if unit == INPUT else summary.output_tokens_per_s


def make_row(workload: str, adapters: int, ours: float | None, unit: str, slots: SlotUse | None) -> Row:
    """What every row has; `base_ours` comes with `with_bases`."""
    peer = _peer(workload, adapters, unit)
    return {
        "workload": workload,
        "adapters": adapters,
        "slots": slots.slots if slots else None,
        "ours": rounded(ours),
        "unit": unit,
        "peer_default": peer.get("default"),
        "peer_best": peer.get("best"),
        "base_ours": None,
    }


def details(summary: Summary, slots: SlotUse | None, cpu: Mapping[str, float] | None = None) -> Row:
    """The rest of a recording: latencies in milliseconds, throughput, what the slots did, and how many cores
    each process used."""
    row: Row = {
        "requests": summary.requests,
        "whole": summary.whole,
        "failed": summary.failed,
        "errors": dict(summary.errors),
        "seconds": rounded(summary.seconds),
        "adapters_used": summary.adapters,
        "requests_per_s": rounded(summary.requests_per_s),
        "input_tokens_per_s": rounded(summary.input_tokens_per_s),
        "output_tokens_per_s": rounded(summary.output_tokens_per_s),
        "ttft_ms": spread_row(summary.ttft_ms),
        "itl_ms": spread_row(summary.itl_ms),
        "tpot_ms": spread_row(summary.tpot_ms),
        "late_ms": rounded(summary.late_ms),
        "cpu_cores": {name: rounded(cores, 3) for name, cores in (cpu or {}).items()},
    }
    if slots:
        row |= {name: rounded(value) for name, value in asdict(slots).items() if name != "slots"}
    return row


def with_bases(rows: Sequence[Row]) -> list[Row]:
    """Each row with our own figure for the same requests without an adapter, where there is one.

    "D2 uniform, from disk" is measured against "D2": what stands before the first comma or kind.
    """
    bases = {(row["workload"], row["unit"]): row["ours"] for row in rows if not row["adapters"]}
    return [
        row | {"base_ours": _base(row, bases)} if row["adapters"] and row["base_ours"] is None else row
        for row in rows
    ]


def _base(row: Row, bases: Mapping[tuple[str, str], float]) -> float | None:
    name, unit = row["workload"], row["unit"]
    return bases.get((name, unit)) or bases.get((name.partition(" ")[0], unit))


def rounded(value: float | None, digits: int = 4) -> float | None:
    """To `digits` significant ones, as much as a measurement is worth; large values to whole numbers."""
    if value is None or isinstance(value, int):
        return value
    number = float(f"{value:.{digits}g}")
    return number if abs(number) < 10**digits else float(round(value))


def spread_row(spread: Spread | None) -> Row | None:
    """Mean and percentiles in milliseconds."""
    if spread is None:
        return None
    row = {name: rounded(getattr(spread, name)) for name in ("mean", "p50", "p90", "p99")}
    return row | {"curve": [rounded(value) for value in spread.curve]}


def _peer(workload: str, adapters: int, unit: str) -> Mapping[str, Any]:
    for row in peer_figures()["rows"]:
        if (row["workload"], row["adapters"], row["unit"]) == (workload, adapters, unit):
            found: Mapping[str, Any] = row
            return found
    return {}


def peer_figures() -> Mapping[str, Any]:
    """{"source": how they were measured, "rows": [{workload, adapters, unit, default, best}]}."""
    text = resources.files("lorafleet.bench").joinpath("peer.json").read_text(encoding="utf-8")
    figures: Mapping[str, Any] = json.loads(text)
    return figures
