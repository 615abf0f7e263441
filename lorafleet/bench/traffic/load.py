"""What real traffic is: its adapters, their ranks and popularity, lengths and arrivals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from random import Random

from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.popularity import choose
from lorafleet.bench.requests import Request
from lorafleet.bench.workload import Description, Names, generate

ADAPTERS, POPULARITY = 1000, "zipf:1.0"
# Of adapters 0 to 9, 10 to 19, ...: 60 % have rank 8, 30 % rank 16, 10 % rank 32, at any popularity.
_RANKS = (8, 8, 8, 16, 8, 8, 16, 8, 16, 32)
_SEED = "real traffic"


@dataclass(frozen=True, slots=True)
class Traffic:
    """`draws`: the adapters of so many requests are drawn, then the same ones come again. So no others need
    to be in the store."""

    prompt: Lengths = field(default_factory=lambda: Lengths("uniform", 128, 1024))
    output: Lengths = field(default_factory=lambda: Lengths("uniform", 64, 256))
    draws: int = 6000

    def requests(self, count: int, rate: float | None, names: Names) -> list[Request]:
        """So many, as a Poisson process of `rate` requests a second; None: all at once. The first ones are
        the same whatever `count` is. Raises BenchError."""
        arrivals = "at-once" if rate is None else "poisson"
        made = generate(
            Description(count, self.prompt, self.output, arrivals=arrivals, rate=rate or 0.0), names, _SEED
        )
        drawn = islice(cycle(self._drawn()), count)
        return [
            replace(request, adapter=names.adapter(adapter))
            for request, adapter in zip(made, drawn, strict=True)
        ]

    def named(self) -> dict[int, list[int]]:
        """The adapters that any request names, by their rank."""
        numbers = sorted(set(self._drawn()))
        return {
            rank: [number for number in numbers if rank_of(number) == rank] for rank in sorted(set(_RANKS))
        }

    def shrunk(self, divisor: int) -> "Traffic":
        """The same traffic with shorter prompts and answers, for a try-out."""
        return replace(self, prompt=_divided(self.prompt, divisor), output=_divided(self.output, divisor))

    def _drawn(self) -> Sequence[int]:
        drawn = choose(POPULARITY, self.draws, ADAPTERS, Random(f"{_SEED} adapters"))
        return [number for number in drawn if number is not None]


def rank_of(number: int) -> int:
    return _RANKS[number % len(_RANKS)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is measured, one row each: the capacity, then Poisson traffic at these multiples of it.

    capacity  requests a second; 0: it is measured, by `capacity_requests` of which `under_way` are under way
              at any time
    seconds   during which requests arrive, at most the capacity; `overload_seconds`: above it
    pause_s   the shortest pause of a stream that is looked into
    """

    at: tuple[float, ...] = (0.5, 0.7, 0.9, 2.0)
    capacity: float = 0.0
    capacity_requests: int = 1200
    under_way: int = 256
    seconds: float = 120.0
    overload_seconds: float = 40.0
    pause_s: float = 0.1

    def __post_init__(self) -> None:
        if not self.capacity and self.capacity_requests <= 2 * self.under_way:
            raise BenchError(
                f"--capacity-requests {self.capacity_requests} must be more than twice "
                f"--under-way {self.under_way}: the first and the last ones do not count"
            )
        if any(factor <= 0 for factor in self.at) or self.capacity < 0:
            raise BenchError("--at and --capacity must be above 0")

    def seconds_at(self, factor: float) -> float:
        return self.seconds if factor <= 1 else self.overload_seconds


def _divided(lengths: Lengths, divisor: int) -> Lengths:
    return replace(lengths, first=max(1, lengths.first // divisor), second=max(1, lengths.second // divisor))
