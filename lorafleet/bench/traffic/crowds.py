"""Who passes whom: first tokens by what a request's adapter did when it came. Pure."""

from collections.abc import Iterable, Sequence

from lorafleet.bench.requests import Record
from lorafleet.bench.rows import Row, rounded, spread_row
from lorafleet.bench.statistics import Spread, percentile

STREAMING, USED, FIRST = "streaming", "used before", "first use"


def crowds(records: Sequence[Record], used: Iterable[str]) -> Row:
    """TTFT by crowd: another answer of the same adapter was streaming when the request was sent, so it was in
    a slot; it was used before, in this play or (`used`) earlier; or it never was."""
    seen = set(used)
    until: dict[str, float] = {}  # when the last answer of each adapter ends that has begun by now
    waits: dict[str, list[float]] = {STREAMING: [], USED: [], FIRST: []}
    beginnings = sorted((each for each in records if each.pieces), key=lambda each: each.pieces[0][0])
    begun = 0
    for record in sorted(records, key=lambda each: each.sent):
        while begun < len(beginnings) and beginnings[begun].pieces[0][0] <= record.sent:
            one = beginnings[begun]
            adapter = one.request.adapter or ""
            until[adapter] = max(until.get(adapter, 0.0), one.pieces[-1][0])
            begun += 1
        adapter = record.request.adapter or ""
        crowd = STREAMING if until.get(adapter, 0.0) > record.sent else USED if adapter in seen else FIRST
        seen.add(adapter)
        if record.pieces:
            waits[crowd].append(record.pieces[0][0] - record.sent)
    return {crowd: ttft_row(values) for crowd, values in waits.items()}


def ttft_row(seconds: Sequence[float]) -> Row | None:
    """How many, mean, percentiles and the longest, in milliseconds."""
    spread = spread_row(Spread.of(seconds))
    return spread and {"count": len(seconds), **spread, "max": rounded(1e3 * max(seconds))}


def delays(records: Iterable[Record]) -> Row:
    """What each reason of failure was told with: how often, after how long, and when to come again."""
    failed: dict[str, list[Record]] = {}
    for record in records:
        if record.error:
            failed.setdefault(record.error, []).append(record)
    return {reason: _delays(members) for reason, members in failed.items()}


def _delays(records: Sequence[Record]) -> Row:
    after = sorted((record.ended or record.sent) - record.sent for record in records)
    retry = sorted(each.retry_after for each in records if each.retry_after is not None)
    return {
        "count": len(records),
        "after_ms": {"p50": rounded(1e3 * percentile(after, 50)), "max": rounded(1e3 * after[-1])},
        "without_retry_delay": len(records) - len(retry),
        "retry_after_s": {"least": retry[0], "p50": percentile(retry, 50), "most": retry[-1]}
        if retry
        else None,
    }
