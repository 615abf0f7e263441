"""Measures real traffic: its capacity, then traffic at multiples of that, a row each."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from lorafleet.bench.errors import BenchError
from lorafleet.bench.requests import Lane, Record, Recording
from lorafleet.bench.rows import OUTPUT, Row, details, make_row, rounded
from lorafleet.bench.session import Played, Session
from lorafleet.bench.statistics import inter_token_gaps
from lorafleet.bench.traffic.crowds import crowds, delays
from lorafleet.bench.traffic.load import ADAPTERS, Schedule, Traffic
from lorafleet.bench.traffic.pauses import find_pauses, pause_row
from lorafleet.bench.traffic.step_lines import StepLines, steps_row

REQUESTS = "requests/s"
GAPS_ABOVE_MS = (20, 50, 100)
_WARM_UP_REQUESTS = 24
_MOST_PAUSES = 40
# The executor's trace is written every half second.
_TRACE_S = 1.0


async def real_traffic(
    session: Session, traffic: Traffic, schedule: Schedule, steps: StepLines | None = None
) -> AsyncIterator[Row]:
    """`steps`: the trace of the executor, where it writes one on this machine.

    Raises BenchError, when nothing was answered, too.
    """
    warm_up = traffic.requests(_WARM_UP_REQUESTS, None, session.names)
    await session.run("warming up", [Lane("warm-up", warm_up)])
    capacity = schedule.capacity
    if not capacity:
        requests = traffic.requests(schedule.capacity_requests, None, session.names)
        lane = Lane("all", requests, schedule.under_way)
        used = set(session.used)
        played = await session.run("capacity of real traffic", [lane])
        capacity = capacity_of(played.recording.records, schedule.under_way)
        row = make_row("real traffic, capacity", ADAPTERS, capacity, REQUESTS, played.slots)
        yield row | await _seen(played, used, schedule, steps)
    for factor in schedule.at:
        rate = factor * capacity
        count = max(2, round(rate * schedule.seconds_at(factor)))
        name = f"real traffic, {factor:g} x {rounded(capacity):g} requests/s"
        used = set(session.used)
        played = await session.run(name, [Lane("all", traffic.requests(count, rate, session.names))])
        row = make_row(name, ADAPTERS, played.summary().output_tokens_per_s, OUTPUT, played.slots)
        yield row | {"offered_requests_per_s": rounded(rate)} | await _seen(played, used, schedule, steps)


def capacity_of(records: Sequence[Record], under_way: int) -> float:
    """Answers a second while so many requests are under way: between the end of the `under_way`-th answer,
    when those that were sent together have gone apart, and the sending of the last request.

    Raises BenchError.
    """
    ends = sorted(record.ended for record in records if record.whole and record.ended)
    last = max(record.sent for record in records)
    counted = [end for end in ends[under_way - 1 :] if end <= last]
    if len(counted) < 2 or counted[-1] <= counted[0]:
        errors = sorted({record.error for record in records if record.error})
        raise BenchError(f"too few answers to tell a capacity: {len(ends)} of {len(records)}, {errors}")
    return (len(counted) - 1) / (counted[-1] - counted[0])


async def _seen(played: Played, used: set[str], schedule: Schedule, steps: StepLines | None) -> Row:
    """All of a play. `used`: the adapters that were asked for before it."""
    recording = played.recording
    summary = played.summary()
    if not summary.whole:
        raise BenchError(f"real traffic: no request was answered: {dict(summary.errors)}")
    row = details(summary, played.slots, played.cpu) | _gaps(recording, schedule)
    if played.slots and (started := played.slots.slot_hits + played.slots.page_ins):
        row["slot_hit_rate"] = rounded(played.slots.slot_hits / started, 3)
    row |= {"crowds": crowds(recording.records, used), "failures": delays(recording.records)}
    pauses = find_pauses(recording.records, schedule.pause_s)
    lines = []
    if steps:
        await asyncio.sleep(_TRACE_S)
        end = recording.ended or recording.started
        lines = await asyncio.to_thread(steps.between, recording.started, end)
        row["steps"] = steps_row(lines)
    worst = sorted(pauses, key=lambda pause: pause.longest, reverse=True)[:_MOST_PAUSES]
    told = [pause_row(pause, recording.started, lines) for pause in sorted(worst, key=lambda p: p.start)]
    return row | {"pause_moments": len(pauses), "pauses": told}


def _gaps(recording: Recording, schedule: Schedule) -> Row:
    """How many pauses between tokens there were, how long the longest was, and how many were above some."""
    gaps = [1e3 * seconds for record in recording.records for _, seconds in inter_token_gaps(record)]
    firsts = [1e3 * (record.pieces[0][0] - record.sent) for record in recording.records if record.pieces]
    wrong = sum(
        record.whole and record.output_tokens != record.request.max_new_tokens for record in recording.records
    )
    return {
        "ttft_max_ms": rounded(max(firsts, default=None)),
        "itl_max_ms": rounded(max(gaps, default=None)),
        "gaps": len(gaps),
        "gaps_above_ms": {str(bound): sum(gap > bound for gap in gaps) for bound in GAPS_ABOVE_MS},
        "wrong_length": wrong,
    }
