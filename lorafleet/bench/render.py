"""Result rows as tables for people."""

from collections.abc import Sequence
from typing import Any

from lorafleet.bench.rows import Row
from lorafleet.terminal import table

_HEAD = ("workload", "adapters", "slots", "ours", "unit", "base", "peer", "peer best", "of peer best")
_LATENCIES = (("TTFT", "ttft_ms"), ("between tokens", "itl_ms"), ("a token", "tpot_ms"))


def rows_table(rows: Sequence[Row]) -> str:
    """One line a row, then what two plays compared say, and everything that failed, by name."""
    lines = [table(_HEAD, [_cells(row) for row in rows])]
    lines += [f"{row['workload']}: {', '.join(found)}" for row in rows if (found := _compared(row))]
    lines += [f"{row['workload']}: {_traffic(row)}" for row in rows if "crowds" in row]
    lines += [
        f"failed in {row['workload']}, {row['adapters']} adapters: {count} x {reason}"
        for row in rows
        for reason, count in row.get("errors", {}).items()
    ]
    if any(row["peer_default"] or row["peer_best"] for row in rows):
        lines.append(
            "peer: vLLM 0.24 with Llama-3.1-8B's shapes on an H100; another card or model is no comparison"
        )
    return "\n".join(lines)


def load_table(row: Row) -> str:
    """All that a row knows of one load."""
    lines = [
        f"requests     {row['whole']} of {row['requests']} whole, {row['failed']} failed, "
        f"{row['adapters_used']} adapters, {_text(row['seconds'])} s",
        f"throughput   {_text(row['requests_per_s'])} requests/s, {_text(row['input_tokens_per_s'])} input "
        f"tok/s, {_text(row['output_tokens_per_s'])} output tok/s",
        *(f"error        {count} x {reason}" for reason, count in row["errors"].items()),
        f"sent late    by {_text(row['late_ms'])} ms at most",
        "",
        table(("ms", "mean", "p50", "p90", "p99"), [_latency(name, row[key]) for name, key in _LATENCIES]),
    ]
    if "page_ins" in row:
        loads = f"{row['loads']} loads from the store{_each(row['load_ms'])}"
        pages = f"{row['page_ins']} page-ins{_each(row['page_in_ms'])}"
        lines += ["", f"{row['slots']} slots: {row['slot_hits']} hits, {pages}, {loads}"]
    if row["cpu_cores"]:
        lines += [
            "",
            "cores used: " + ", ".join(f"{name} {_text(n)}" for name, n in row["cpu_cores"].items()),
        ]
    return "\n".join(lines)


def comparison_table(rows: Sequence[Row]) -> str:
    """The table of `compare.compare`."""
    head = ("workload", "adapters", "unit", "first", "second", "ratio")
    return table(head, [[_text(row[key.replace(" ", "_")]) for key in head] for row in rows])


def _compared(row: Row) -> list[str]:
    """What measures.py adds to its rows."""
    texts = {
        "median_ratio": "median {}x that of the streams alone",
        "p99_ratio": "p99 {}x",
        "paged_in": "{} adapters paged in",
        "paging_s": "within {} s",
        "prompts_arrived": "{} prompts answered meanwhile",
        "of_second": "{}x the second's",
        "of_8_adapters": f"with {row['adapters']} adapters {{}}x that with 8",
    }
    return [text.format(_text(row[key])) for key, text in texts.items() if row.get(key) is not None]


def _traffic(row: Row) -> str:
    """What traffic/measure.py adds to its rows, in milliseconds."""
    first, between = (
        [_text((row[f"{name}_ms"] or {}).get(at)) for at in ("p50", "p99")] + [_text(row[f"{name}_max_ms"])]
        for name in ("ttft", "itl")
    )
    return (
        f"first token p50 {first[0]}, p99 {first[1]}, longest {first[2]}; between tokens p50 {between[0]}, "
        f"p99 {between[1]}, longest {between[2]} ms; {row['pause_moments']} pauses; "
        f"{_text(row.get('slot_hit_rate'))} of the slots' uses were hits"
    )


def _cells(row: Row) -> list[str]:
    best = row["peer_best"] or row["peer_default"]
    names = ("workload", "adapters", "slots", "ours", "unit", "base_ours", "peer_default", "peer_best")
    workload, *figures = (_text(row[name]) for name in names)
    tried = f", lengths / {divisor}" if (divisor := row.get("lengths_divided_by")) else ""
    return [workload + tried, *figures, _ratio(row, best)]


def _ratio(row: Row, best: float | None) -> str:
    """How many times better than the peer's best, whichever direction is better for the unit."""
    if not best or not row["ours"]:
        return "-"
    faster = best / row["ours"] if row["unit"] in ("ms a token", "s") else row["ours"] / best
    return f"{faster:.2f}x"


def _latency(name: str, spread: Row | None) -> list[str]:
    return [name, *(_text(spread[key]) if spread else "-" for key in ("mean", "p50", "p90", "p99"))]


def _each(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f" of {_text(milliseconds)} ms"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
