"""Streams side by side, and the pauses between their tokens: alone, and while something else happens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lorafleet.bench.lengths import Lengths
from lorafleet.bench.requests import Lane, Record, Recording
from lorafleet.bench.rows import Row, details, make_row, rounded, spread_row
from lorafleet.bench.session import Played, Session
from lorafleet.bench.statistics import Spread, inter_token_gaps
from lorafleet.bench.workload import Description, generate


@dataclass(frozen=True, slots=True)
class Gap:
    """A pause of `seconds` in an answer, behind that many of its tokens."""

    behind: int
    seconds: float


def make_streams(session: Session, streams: int, adapters: int, tokens: int) -> Lane:
    """So many requests at once, on the first `adapters` in turn (0: on the base model), 128 tokens in."""
    lengths = Lengths("fixed", 128), Lengths("fixed", tokens)
    description = Description(streams, *lengths, "distinct" if adapters else "none", adapters)
    return Lane("streams", generate(description, session.names, session.seed))


async def run_alone(session: Session, streams: Lane) -> tuple[list[Gap], Row]:
    """The gaps of the streams when nothing else runs and their adapters are resident, and their row."""
    adapters = {request.adapter for request in streams.requests if request.adapter}
    await session.load(sorted(adapters))
    played = await session.run(f"{len(streams.requests)} streams alone", [streams])
    gaps = gaps_between(played.recording.lane("streams"))
    return gaps, streams_row(f"ITL of {len(streams.requests)} streams, alone", len(adapters), gaps, played)


def gaps_between(streams: Recording, start: float | None = None, end: float | None = None) -> list[Gap]:
    """Pauses between tokens while all streams run, and between `start` and `end` where they are given."""
    whole = [record for record in streams.records if record.pieces]
    if not whole:
        return []
    first = max(record.pieces[0][0] for record in whole)
    last = min(record.pieces[-1][0] for record in whole)
    low, high = max(first, start or first), min(last, end or last)
    return [
        Gap(behind, seconds)
        for record in whole
        for behind, (when, seconds) in zip(_lengths(record), inter_token_gaps(record), strict=False)
        if low <= when - seconds and when <= high
    ]


def streams_row(workload: str, adapters: int, gaps: Sequence[Gap], played: Played) -> Row:
    """What is measured is the p99 of `gaps`; everything else is of all streams from start to end."""
    spread = Spread.of(gap.seconds for gap in gaps)
    row = make_row(workload, adapters, spread.p99 if spread else None, "ms p99", played.slots)
    return row | details(played.summary("streams"), played.slots, played.cpu) | {"itl_ms": spread_row(spread)}


def against(gaps: Sequence[Gap], quiet: Sequence[Gap]) -> Row:
    """How many times the quiet streams' median and p99, behind as many tokens: steps grow with them."""
    lengths = {gap.behind for gap in gaps}
    here = Spread.of(gap.seconds for gap in gaps)
    there = Spread.of(gap.seconds for gap in quiet if gap.behind in lengths)
    if not here or not there:
        return {"median_ratio": None, "p99_ratio": None}
    return {"median_ratio": rounded(here.p50 / there.p50), "p99_ratio": rounded(here.p99 / there.p99)}


def _lengths(record: Record) -> Iterator[int]:
    """How many tokens the answer has after each piece."""
    return accumulate(count for _, count in record.pieces)
