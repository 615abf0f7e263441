"""The workloads that LoraFleet is measured with against its peer, as they were measured there.

All are offline, with random token ids, greedy, to their full length. A figure is that of the repetition with
the median time (of two, the slower), after every adapter was used once; "from disk" is the first use instead.
Prompts differ between repetitions, and the executor runs with `--prefix-cache false`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.requests import Lane, Request
from lorafleet.bench.rows import INPUT, OUTPUT, PER_TOKEN, Row, details, make_row, rounded, value_of
from lorafleet.bench.session import Played, Session
from lorafleet.bench.workload import Description, generate

PRESET_SEED = 37  # 256 uniform draws out of 128 name 106 adapters, and Zipf ones 72, as the peer's did


@dataclass(frozen=True, slots=True)
class Case:
    """`cold`: no adapter is in host memory or a slot at the start. `resident`: so many are in slots, and the
    load asks for none of them."""

    workload: str
    description: Description
    repetitions: int = 3
    unit: str = OUTPUT
    cold: bool = False
    resident: int = 0
    divisor: int = 1  # of the lengths, to try it out: then it is not the peer's load any more


def _offline(
    requests: int, prompt: int, output: int, popularity: str = "none", adapters: int = 0, first: int = 0
) -> Description:
    lengths = Lengths("fixed", prompt), Lengths("fixed", output)
    return Description(requests, *lengths, popularity=popularity, adapters=adapters, first_adapter=first)


_D2 = Case("D2", _offline(256, 256, 128), 2)
_LONG = _offline(32, 8000, 128)
PRESETS: Mapping[str, tuple[Case, ...]] = {
    "d1": (
        Case("D1", _offline(64, 128, 128)),
        Case("D1", _offline(64, 128, 128, "one", 1)),
        Case("D1", _offline(64, 128, 128, "distinct", 8)),
        Case("D1", _offline(64, 128, 128, "distinct", 64)),
    ),
    "high-ranks": (
        Case("D1", _offline(64, 128, 128)),
        *(
            Case(f"D1, rank {rank}", _offline(64, 128, 128, "distinct", adapters, first))
            for rank, first in ((64, 0), (16, 32), (32, 64))
            for adapters in (1, 8, 32)
        ),
    ),
    "experts": (
        Case("D1 with experts", _offline(64, 128, 128)),
        Case("D1 with experts", _offline(64, 128, 128, "one", 1)),
        Case("D1 with experts", _offline(64, 128, 128, "distinct", 8)),
    ),
    "experts-attention": (
        Case("D1 with experts, adapters on attention", _offline(64, 128, 128)),
        Case("D1 with experts, adapters on attention", _offline(64, 128, 128, "one", 1)),
        Case("D1 with experts, adapters on attention", _offline(64, 128, 128, "distinct", 8)),
        Case("D1 with experts, adapters on attention", _offline(64, 128, 128, "distinct", 64)),
    ),
    "d2": (_D2, Case("D2", _offline(256, 256, 128, "distinct", 64), 2)),
    "d2-paged": (
        Case("D2 uniform, from disk", _offline(256, 256, 128, "uniform", 128), 1, cold=True),
        Case("D2 uniform, from host memory", _offline(256, 256, 128, "uniform", 128), 2),
        Case("D2 Zipf, from host memory", _offline(256, 256, 128, "zipf", 128), 2),
        _D2,
        Case("D2 Zipf, from disk", _offline(256, 256, 128, "zipf", 128), 1, cold=True),
    ),
    "d3": (
        Case("D3", _offline(1, 128, 128), unit=PER_TOKEN),
        Case("D3", _offline(1, 128, 128, "one", 1), unit=PER_TOKEN),
        Case("D3 x 8", _offline(8, 128, 128)),
        Case("D3 x 8", _offline(8, 128, 128, "distinct", 8)),
    ),
    "d4": (
        Case("D4 8 x 256", _offline(8, 256, 1), 5, INPUT),
        Case("D4 8 x 256", _offline(8, 256, 1, "distinct", 8), 5, INPUT),
        Case("D4 8 x 2047", _offline(8, 2047, 1), 3, INPUT),
        Case("D4 8 x 2047", _offline(8, 2047, 1, "distinct", 8), 3, INPUT),
    ),
    "base-traffic": (
        Case("32 x 8000 in, slots empty", _LONG, 2),
        Case("32 x 8000 in, 8 adapters resident", _LONG, 2, resident=8),
    ),
}


async def run_case(case: Case, session: Session) -> Row | None:
    """None when adapters must come from the store that were used before, and cannot be dropped.

    Raises BenchError when nothing was answered.
    """
    if not await _prepare(case, session):
        return None
    label = f"{case.workload}, {case.description.adapters} adapters"
    plays = []
    for number in range(case.repetitions):
        lane = Lane("all", _requests(case, session, number))
        plays.append(await session.run(f"{label}, {number + 1} of {case.repetitions}", [lane]))
    return _row(case, plays)


def shrunk(case: Case, divisor: int) -> Case:
    """The same with shorter prompts and answers, to try it where it would take too long. Its row says so."""
    one = case.description
    shorter = replace(one, prompt=_divided(one.prompt, divisor), output=_divided(one.output, divisor))
    return replace(case, description=shorter, divisor=divisor)


def _divided(lengths: Lengths, divisor: int) -> Lengths:
    return replace(lengths, first=max(1, lengths.first // divisor))


def _requests(case: Case, session: Session, repetition: int) -> list[Request]:
    """The same adapters in each repetition, other prompts."""
    drawn = generate(case.description, session.names, PRESET_SEED)
    other = generate(case.description, session.names, f"{session.seed} repetition {repetition}")
    return [
        replace(request, prompt_token_ids=fresh.prompt_token_ids)
        for request, fresh in zip(drawn, other, strict=True)
    ]


async def _prepare(case: Case, session: Session) -> bool:
    """Whether the adapters are where the case wants them."""
    await session.warm_up()
    named = {request.adapter for request in _requests(case, session, 0)}
    named.update(session.names.adapter(number) for number in range(case.resident))
    adapters = sorted(adapter for adapter in named if adapter)
    if case.cold:
        return session.forget(adapters, case.workload)
    await session.load(adapters)
    return True


def _row(case: Case, plays: list[Played]) -> Row:
    by_time = sorted(plays, key=lambda played: played.summary().seconds)
    chosen = by_time[len(by_time) // 2]
    summary = chosen.summary()
    if not summary.whole:
        raise BenchError(f"{case.workload}: no request was answered: {dict(summary.errors)}")
    row = make_row(
        case.workload,
        case.description.adapters,
        value_of(summary, case.unit),
        case.unit,
        chosen.slots,
    )
    seconds = [rounded(played.summary().seconds) for played in plays]
    row |= details(summary, chosen.slots, chosen.cpu) | {"repetitions_s": seconds}
    if case.divisor > 1:
        row |= {"lengths_divided_by": case.divisor, "peer_default": None, "peer_best": None}
    return row
