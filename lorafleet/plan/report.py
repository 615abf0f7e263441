"""A plan for people and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lorafleet.plan.search import Fleet, Goals, Outcome, Search
from lorafleet.terminal import size, table

Row = Mapping[str, Any]
_FLAT = (
    "more executors do not help: single requests take that long, as for a long prompt, or for the way of an "
    "adapter from the store at its first use (--store-rate tells how fast; a longer --warm-up leaves it out)"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a slot, of an adapter of the highest rank in host memory, and tokens in the KV cache of an
    executor, by its slots."""

    max_rank: int
    slot_bytes: int
    adapter_bytes: int
    kv_tokens: Mapping[int, int]


def rows_of(tried: Mapping[Fleet, Outcome], goals: Goals, sizes: Sizes) -> list[Row]:
    """The rows of all fleets that were tried, the smallest first."""
    return [
        {
            **asdict(fleet),
            "kv_tokens": sizes.kv_tokens[fleet.slots],
            **asdict(outcome),
            "meets": goals.met_by(outcome),
        }
        for fleet, outcome in sorted(tried.items())
    ]


def progress_line(fleet: Fleet, outcome: Outcome, goals: Goals) -> str:
    met = "goals met" if goals.met_by(outcome) else "goals missed"
    return (
        f"{fleet.executors} x {fleet.slots} slots, {size(fleet.host_bytes)}: "
        f"TTFT p99 {_milliseconds(outcome.ttft_p99_s)} ms, {met}"
    )


def text_of(rows: Sequence[Row], search: Search, sizes: Sizes, seats: int) -> str:
    """The table, with a mark at the best, and what it means."""
    best, goals = search.best, search.goals
    head = (
        "",
        "executors",
        "slots",
        "host memory",
        "TTFT p50",
        "p99",
        "tok/s a stream",
        "tok/s",
        "page-ins",
        "goals",
    )
    lines = [table(head, [_cells(row, best) for row in rows])]
    lines.append("TTFT in ms; tok/s a stream: what 99 % have at least; page-ins: for each request")
    if best is None:
        lines.append(f"no fleet that was tried reaches {_goals(goals)}")
        if search.is_flat:
            lines.append(_FLAT)
        return "\n".join(lines)
    executors = "1 executor" if best.executors == 1 else f"{best.executors} executors"
    return "\n".join(
        [
            *lines,
            f"{executors} of {best.slots} slots and {size(best.host_bytes)} of host memory: {_goals(goals)}",
            f"start each with --max-loras {best.slots} --max-lora-rank {sizes.max_rank} "
            f"--host-memory-bytes {best.host_bytes} --max-seats {seats}",
            f"a slot takes {size(sizes.slot_bytes)}, an adapter of rank {sizes.max_rank} in host memory "
            f"{size(sizes.adapter_bytes)}; KV blocks hold {sizes.kv_tokens[best.slots]:,} tokens",
        ]
    )


def _goals(goals: Goals) -> str:
    parts = [f"a p99 TTFT of {goals.ttft_p99_s * 1e3:,.0f} ms"]
    if goals.stream_tokens_s:
        parts.append(f"{goals.stream_tokens_s:g} tok/s for 99 % of the streams")
    return " and ".join(parts)


def _cells(row: Row, best: Fleet | None) -> list[str]:
    fleet = Fleet(row["executors"], row["slots"], row["host_bytes"])
    return [
        "*" if fleet == best else "",
        f"{fleet.executors}",
        f"{fleet.slots}",
        size(fleet.host_bytes),
        _milliseconds(row["ttft_p50_s"]),
        _milliseconds(row["ttft_p99_s"]),
        f"{row['stream_tokens_s']:.1f}",
        f"{row['tokens_s']:,.0f}",
        f"{row['page_ins_per_request']:.2f}",
        "met" if row["meets"] else f"{row['failed']:.1%} failed" if row["failed"] else "missed",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"
