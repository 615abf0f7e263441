"""Measurements that compare plays: what happens to running streams, and to first tokens. A row a play."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.requests import Lane, Recording, Request
from lorafleet.bench.rows import Row, details, make_row, rounded, spread_row
from lorafleet.bench.session import Played, Session
from lorafleet.bench.statistics import Spread, inter_token_gaps
from lorafleet.bench.workload import Description, generate

STREAMS, STREAM_ADAPTERS = 64, 8
# Adapters of the light load and how requests choose among them; the first fit in the slots.
LIGHT_LOADS = ((8, "uniform"), (12, "uniform"), (16, "uniform"), (32, "uniform"), (16, "zipf"), (32, "zipf"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of an answer of the 64 streams, and how the disturbances come; divided for a try-out.

    Beside page-ins the streams are longer: 100 adapters take some 8 s from the store, one after the other.
    """

    stream_tokens: int = 512
    paged_stream_tokens: int = 1536
    paged_adapters: int = 100
    prompts_per_s: float = 20.0
    light_per_s: float = 4.0
    light_requests: int = 60
    light_tokens: int = 64


def shrunk(divisor: int) -> Sizes:
    """For a try-out."""
    full = Sizes()
    return Sizes(
        stream_tokens=full.stream_tokens // divisor,
        paged_stream_tokens=full.paged_stream_tokens // divisor,
        paged_adapters=max(2, full.paged_adapters // divisor),
        light_requests=full.light_requests // divisor,
        light_tokens=max(2, full.light_tokens // divisor),
        light_per_s=full.light_per_s * divisor,
    )


async def page_in_stall(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """64 streams on 8 resident adapters while 100 others page in back to back, from the store and then from
    host memory, against the same streams alone. Only gaps that end while adapters page in are counted.

    The executor needs more than 8 slots, and host memory for 108 adapters.
    """
    streams = _streams(session, sizes.paged_stream_tokens)
    quiet, alone = await _alone(session, streams)
    yield alone
    pages = Lane("pages", _pages(session, sizes), max_concurrency=1, background=True)
    adapters = [request.adapter for request in pages.requests if request.adapter]
    name = "ITL of 64 streams, page-ins from the store"
    if session.forget(adapters, name):
        yield await _paging_row(session, name, streams, pages, quiet)
    await session.load(adapters)
    yield await _paging_row(session, "ITL of 64 streams, page-ins from host memory", streams, pages, quiet)


async def _paging_row(session: Session, name: str, streams: Lane, pages: Lane, quiet: Sequence[float]) -> Row:
    played = await session.run(name, [streams, pages])
    paging = [record for record in played.recording.lane("pages").records if record.whole]
    if not paging:
        raise BenchError("no adapter paged in while the streams ran: make the streams longer")
    start, end = paging[0].sent, paging[-1].pieces[-1][0]
    gaps = _gaps(played.recording.lane("streams"), start, end)
    row = _spread_row(name, len(pages.requests), gaps, played) | _against(gaps, quiet)
    return row | {"paged_in": len(paging), "paging_s": rounded(end - start)}


async def arriving_prompts(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """64 streams while short prompts (32 to 128 tokens, 8 tokens back) keep arriving, against them alone."""
    streams = _streams(session, sizes.stream_tokens)
    quiet, alone = await _alone(session, streams)
    yield alone
    short = Description(
        requests=round(sizes.prompts_per_s * 600),
        prompt=Lengths("uniform", 32, 128),
        output=Lengths("fixed", 8),
        popularity="uniform",
        adapters=STREAM_ADAPTERS,
        arrivals="poisson",
        rate=sizes.prompts_per_s,
    )
    lane = Lane("short", generate(short, session.names, session.seed), background=True)
    played = await session.run("64 streams while prompts arrive", [streams, lane])
    gaps = _gaps(played.recording.lane("streams"))
    arrived = sum(record.whole for record in played.recording.lane("short").records)
    name = f"ITL of 64 streams, {sizes.prompts_per_s:g} prompts/s arriving"
    row = _spread_row(name, STREAM_ADAPTERS, gaps, played) | _against(gaps, quiet)
    yield row | {"prompts_arrived": arrived, "arrived_ttft_ms": spread_row(played.summary("short").ttft_ms)}


async def no_cliff(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """Time to first token under the same light load, with as many adapters as slots and with up to four times
    as many.

    The executor should have 8 slots. Everything was used before: adapters come from host memory.
    """
    few = None
    for adapters, popularity in LIGHT_LOADS:
        light = Description(
            requests=sizes.light_requests,
            prompt=Lengths("fixed", 128),
            output=Lengths("fixed", sizes.light_tokens),
            popularity=popularity,
            adapters=adapters,
            arrivals="poisson",
            rate=sizes.light_per_s,
        )
        requests = generate(light, session.names, session.seed)
        await session.load(sorted({request.adapter for request in requests if request.adapter}))
        played = await session.run(f"light load, {adapters} adapters, {popularity}", [Lane("all", requests)])
        ttft = played.summary().ttft_ms
        name = f"TTFT p50, {sizes.light_per_s:g} requests/s" + (", Zipf" if popularity == "zipf" else "")
        row = make_row(name, adapters, ttft.p50 if ttft else None, "ms", played.slots)
        row |= details(played.summary(), played.slots, played.cpu)
        if (adapters, popularity) == LIGHT_LOADS[0]:
            few = row["ours"]
        elif few and row["ours"]:
            row["of_8_adapters"] = rounded(row["ours"] / few)
        yield row


Measure = Callable[[Session, Sizes], AsyncIterator[Row]]
MEASURES: Mapping[str, Measure] = {
    "page-in-stall": page_in_stall,
    "arriving-prompts": arriving_prompts,
    "no-cliff": no_cliff,
}


def _streams(session: Session, tokens: int) -> Lane:
    lengths = Lengths("fixed", 128), Lengths("fixed", tokens)
    description = Description(STREAMS, *lengths, popularity="distinct", adapters=STREAM_ADAPTERS)
    return Lane("streams", generate(description, session.names, session.seed))


def _pages(session: Session, sizes: Sizes) -> list[Request]:
    one, count = Lengths("fixed", 1), sizes.paged_adapters
    description = Description(count, one, one, "distinct", count, STREAM_ADAPTERS)
    return generate(description, session.names, session.seed)


async def _alone(session: Session, streams: Lane) -> tuple[list[float], Row]:
    """The gaps of the streams when nothing else runs and their adapters are resident, and their row."""
    await session.load(sorted({request.adapter for request in streams.requests if request.adapter}))
    played = await session.run("64 streams alone", [streams])
    gaps = _gaps(played.recording.lane("streams"))
    return gaps, _spread_row("ITL of 64 streams, alone", STREAM_ADAPTERS, gaps, played)


def _gaps(streams: Recording, start: float | None = None, end: float | None = None) -> list[float]:
    """Pauses between tokens while all streams run, and between `start` and `end` where they are given."""
    whole = [record for record in streams.records if record.pieces]
    if not whole:
        return []
    first = max(record.pieces[0][0] for record in whole)
    last = min(record.pieces[-1][0] for record in whole)
    low, high = max(first, start or first), min(last, end or last)
    return [
        gap
        for record in whole
        for when, gap in inter_token_gaps(record)
        if low <= when - gap and when <= high
    ]


def _spread_row(workload: str, adapters: int, gaps: Sequence[float], played: Played) -> Row:
    """What is measured is the p99 of `gaps`; everything else is of all streams from start to end."""
    spread = Spread.of(gaps)
    row = make_row(workload, adapters, spread.p99 if spread else None, "ms p99", played.slots)
    return row | details(played.summary("streams"), played.slots, played.cpu) | {"itl_ms": spread_row(spread)}


def _against(gaps: Sequence[float], quiet: Sequence[float]) -> Row:
    """How many times the quiet streams' median and p99."""
    here, there = Spread.of(gaps), Spread.of(quiet)
    if not here or not there:
        return {"median_ratio": None, "p99_ratio": None}
    return {"median_ratio": rounded(here.p50 / there.p50), "p99_ratio": rounded(here.p99 / there.p99)}
