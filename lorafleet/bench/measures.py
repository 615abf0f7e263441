"""Measurements that compare plays: what happens to running streams, and to first tokens.

Each play gives a row.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.requests import Lane, Record, Request
from lorafleet.bench.rows import Row, details, make_row, rounded, spread_row
from lorafleet.bench.session import Played, Session
from lorafleet.bench.slot_use import SlotUse
from lorafleet.bench.statistics import Spread
from lorafleet.bench.streams import Gap, against, gaps_between, make_streams, run_alone, streams_row
from lorafleet.bench.workload import Description, generate

STREAMS, STREAM_ADAPTERS = 64, 8
# Adapters of the light load and how requests choose among them; the first fit in the slots.
LIGHT_LOADS = ((8, "uniform"), (12, "uniform"), (16, "uniform"), (32, "uniform"), (16, "zipf"), (32, "zipf"))
# Ranks of adapters 0 and 1, 2 and 3, 4 and 5, and the (odd) prompts that they are first used with.
FIRST_RANKS, FIRST_PROMPTS, FIRST_STREAMS = (8, 16, 64), (3, 3, 77, 77, 131, 131), 8
# Streams beside a slow store, and the adapters that they use; those that come are the next ones.
SLOW_STREAMS, SLOW_STREAM_ADAPTERS = 16, 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of an answer of the streams, and how the disturbances come; divided for a try-out.

    Beside page-ins the streams are longer: 100 adapters take some 8 s from the store, one after the other,
    and from a slow store a big one takes as long alone.
    """

    stream_tokens: int = 512
    paged_stream_tokens: int = 1536
    paged_adapters: int = 100
    prompts_per_s: float = 20.0
    light_per_s: float = 4.0
    light_requests: int = 60
    light_tokens: int = 64
    first_use_after_s: float = 0.5
    slow_stream_tokens: int = 4096
    slow_adapters: int = 8
    slow_every_s: float = 2.0


def shrunk(divisor: int) -> Sizes:
    """The same, smaller, for a try-out."""
    full = Sizes()
    return Sizes(
        stream_tokens=full.stream_tokens // divisor,
        paged_stream_tokens=full.paged_stream_tokens // divisor,
        paged_adapters=max(2, full.paged_adapters // divisor),
        light_requests=full.light_requests // divisor,
        light_tokens=max(2, full.light_tokens // divisor),
        light_per_s=full.light_per_s * divisor,
        first_use_after_s=full.first_use_after_s / divisor,
        slow_stream_tokens=full.slow_stream_tokens // divisor,
        slow_every_s=full.slow_every_s / divisor,
    )


async def page_in_stall(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """64 streams on 8 resident adapters while 100 others page in back to back, from the store and then from
    host memory, against the same streams alone. Only gaps that end while adapters page in are counted.

    The executor needs more than 8 slots, and host memory for 108 adapters.
    """
    streams = make_streams(session, STREAMS, STREAM_ADAPTERS, sizes.paged_stream_tokens)
    quiet, alone = await run_alone(session, streams)
    yield alone
    pages = _pages(session, sizes.paged_adapters, STREAM_ADAPTERS)
    name = "ITL of 64 streams, page-ins from the store"
    if session.forget(_adapters(pages), name):
        yield await _paging_row(session, name, streams, _one_by_one(pages), quiet)
    await session.load(_adapters(pages))
    name = "ITL of 64 streams, page-ins from host memory"
    yield await _paging_row(session, name, streams, _one_by_one(pages), quiet)


async def slow_store(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """16 streams on 4 resident adapters while other ones are asked for, one every 2 s, against the same
    streams alone. Only gaps until the last one that comes in time are counted.

    The adapters should be big, and the store slow.
    """
    streams = make_streams(session, SLOW_STREAMS, SLOW_STREAM_ADAPTERS, sizes.slow_stream_tokens)
    quiet, alone = await run_alone(session, streams)
    yield alone
    asked = enumerate(_pages(session, sizes.slow_adapters, SLOW_STREAM_ADAPTERS))
    pages = [replace(request, at=number * sizes.slow_every_s) for number, request in asked]
    name = "ITL of 16 streams, loads from a slow store"
    if session.forget(_adapters(pages), name):
        yield await _paging_row(session, name, streams, Lane("pages", pages, background=True), quiet)


async def _paging_row(session: Session, name: str, streams: Lane, pages: Lane, quiet: Sequence[Gap]) -> Row:
    played = await session.run(name, [streams, pages])
    paging = _answered(played)
    start, end = paging[0].sent, max(record.pieces[-1][0] for record in paging)
    gaps = gaps_between(played.recording.lane("streams"), start, end)
    row = streams_row(name, len(pages.requests), gaps, played) | against(gaps, quiet)
    return row | {"paged_in": len(paging), "paging_s": rounded(end - start)}


async def first_use(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """Time to first token of the first requests of all against later ones, and of the first adapter of each
    of three ranks against the second one, while 8 streams run; and what that does to the streams.

    Adapters 0 to 5 should have the ranks 8, 8, 16, 16, 64, 64, and nothing should be asked before.
    """
    streams = make_streams(session, FIRST_STREAMS, 0, sizes.stream_tokens)
    pages = [
        replace(request, at=sizes.first_use_after_s, prompt_token_ids=request.prompt_token_ids * tokens)
        for request, tokens in zip(_pages(session, 2 * len(FIRST_RANKS), 0), FIRST_PROMPTS, strict=True)
    ]
    name = "ITL of 8 streams, ranks used for the first time"
    if not session.forget(_adapters(pages), name):
        return
    before = await session.run("8 streams, the first requests of all", [streams])
    played = await session.run(name, [streams, _one_by_one(pages)])
    answered, slots = _answered(played), played.slots
    firsts, seconds = (one.recording.lane("streams") for one in (before, played))
    yield _first_row("TTFT, first requests of all", 0, firsts.records, seconds.records, slots)
    for rank, first, second in zip(FIRST_RANKS, answered[::2], answered[1::2], strict=False):
        yield _first_row(f"TTFT, first adapter of rank {rank}", 1, [first], [second], slots)
    gaps = gaps_between(seconds, answered[0].sent, answered[-1].pieces[-1][0])
    yield streams_row(name, len(pages), gaps, played) | against(gaps, gaps_between(firsts))


def _first_row(
    workload: str, adapters: int, first: Sequence[Record], second: Sequence[Record], slots: SlotUse | None
) -> Row:
    """The first ones' median, and how many times the second ones'."""
    firsts, seconds = (
        Spread.of(record.pieces[0][0] - record.sent for record in one if record.pieces)
        for one in (first, second)
    )
    if not firsts or not seconds:
        raise BenchError(f"{workload}: no request was answered")
    row = make_row(workload, adapters, firsts.p50, "ms", slots)
    return row | {"ttft_ms": spread_row(firsts), "of_second": rounded(firsts.p50 / seconds.p50)}


def _pages(session: Session, count: int, first: int) -> list[Request]:
    """One token of each of `count` adapters."""
    one = Lengths("fixed", 1)
    return generate(Description(count, one, one, "distinct", count, first), session.names, session.seed)


def _one_by_one(pages: Sequence[Request]) -> Lane:
    return Lane("pages", pages, max_concurrency=1, background=True)


def _adapters(pages: Sequence[Request]) -> list[str]:
    return [request.adapter for request in pages if request.adapter]


def _answered(played: Played) -> list[Record]:
    """In the order in which they were asked. Raises BenchError when there are none."""
    answered = [record for record in played.recording.lane("pages").records if record.whole]
    if not answered:
        raise BenchError("no adapter paged in while the streams ran: make the streams longer")
    return answered


async def arriving_prompts(session: Session, sizes: Sizes) -> AsyncIterator[Row]:
    """64 streams while short prompts (32 to 128 tokens, 8 tokens back) keep arriving, against them alone."""
    streams = make_streams(session, STREAMS, STREAM_ADAPTERS, sizes.stream_tokens)
    quiet, alone = await run_alone(session, streams)
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
    gaps = gaps_between(played.recording.lane("streams"))
    arrived = sum(record.whole for record in played.recording.lane("short").records)
    name = f"ITL of 64 streams, {sizes.prompts_per_s:g} prompts/s arriving"
    row = streams_row(name, STREAM_ADAPTERS, gaps, played) | against(gaps, quiet)
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
    "slow-store": slow_store,
    "first-use": first_use,
    "arriving-prompts": arriving_prompts,
    "no-cliff": no_cliff,
}
