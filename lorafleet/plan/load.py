"""The load of a plan: when requests come, how long they are, and the adapters they name. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lorafleet.bench import workload
from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths

RANK_FORMS = "R, or R:SHARE,R:SHARE... as 8:60,16:30,32:10"
# Multiples of it, less whole numbers, are spread evenly: so are ranks over adapters of any popularity.
_GOLDEN = 0.6180339887498949
# Tokens themselves do not matter, and neither do prefixes.
_NAMES = workload.Names(vocab_size=1, prefix="")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `at` seconds after the start. `adapter` is None for the base model."""

    at: float
    prompt_tokens: int
    output_tokens: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Load:
    """`arrivals` in order of time; `ranks` of all adapters that they name."""

    arrivals: Sequence[Arrival]
    ranks: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together."""
        return max(arrival.prompt_tokens + arrival.output_tokens for arrival in self.arrivals)

    @property
    def max_rank(self) -> int:
        """1 where nobody names an adapter: executors have slots of some rank."""
        return max(self.ranks.values(), default=1)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks and the share of adapters that has each."""

    shares: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> "Ranks":
        """From RANK_FORMS. Raises BenchError."""
        parts = [part.split(":") for part in text.split(",")] if ":" in text else [[text, "1"]]
        try:
            shares = tuple((int(rank), float(share)) for rank, share in parts)
        except ValueError:
            raise BenchError(f"ranks {text!r} are not {RANK_FORMS}") from None
        total = sum(share for _, share in shares)
        if any(not 1 <= rank <= 512 or not share > 0 for rank, share in shares) or not total < float("inf"):
            raise BenchError(f"ranks {text!r}: each is from 1 to 512, with a share above 0")
        return cls(shares)

    def of(self, names: Iterable[str]) -> Mapping[str, int]:
        """Spread over the names, in their order."""
        bounds = list(accumulate(share for _, share in self.shares))
        ranks = {}
        for number, name in enumerate(names):
            at = (0.5 + number * _GOLDEN) % 1.0 * bounds[-1]
            ranks[name] = next(
                rank for (rank, _), bound in zip(self.shares, bounds, strict=True) if at < bound
            )
        return ranks


@dataclass(frozen=True, slots=True)
class Description:
    """Requests of a Poisson process, or of one with gamma-distributed gaps; forms as in lorafleet/bench."""

    rate: float
    seconds: float
    prompt: Lengths
    output: Lengths
    popularity: str
    adapters: int
    ranks: Ranks
    burstiness: float = 1.0


def described(one: Description, seed: int) -> Load:
    """Draws it; the same seed draws the same load as in `lorafleet bench`. Raises BenchError."""
    requests = workload.Description(
        max(1, round(one.rate * one.seconds)),
        one.prompt,
        one.output,
        popularity=one.popularity,
        adapters=one.adapters,
        arrivals="gamma",
        rate=one.rate,
        burstiness=one.burstiness,
    )
    arrivals = [
        Arrival(drawn.at, drawn.prompt_tokens, drawn.output_tokens, _NAMES.adapter(drawn.adapter))
        for drawn in workload.draw(requests, seed)
    ]
    asked = {arrival.adapter for arrival in arrivals}
    every = one.ranks.of(str(_NAMES.adapter(number)) for number in range(one.adapters))
    return Load(arrivals, {name: rank for name, rank in every.items() if name in asked})


def traced(file: Path, ranks: Ranks) -> Load:
    """A trace of `lorafleet bench load`; the first request comes at 0. Adapters get their ranks in the order
    in which they are asked for first. Raises BenchError naming the line, OSError."""
    arrivals = [
        Arrival(request.at, len(request.prompt_token_ids), request.max_new_tokens, request.adapter)
        for request in workload.read_trace(file, _NAMES, seed=0)
    ]
    names = dict.fromkeys(arrival.adapter for arrival in arrivals if arrival.adapter)
    return Load(arrivals, ranks.of(names))
