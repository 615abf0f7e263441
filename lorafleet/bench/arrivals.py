"""When requests come. Pure: a seeded generator in, seconds out."""

from itertools import accumulate
from random import Random

from lorafleet.bench.errors import BenchError

KINDS = ("at-once", "poisson", "gamma")


def arrival_times(
    kind: str, count: int, rng: Random, *, rate: float = 0.0, burstiness: float = 1.0
) -> list[float]:
    """`count` times in ascending order, the first at 0.

    Gaps are gamma-distributed with mean 1/rate and shape `burstiness`: 1 is a Poisson process, below 1 comes
    in bursts, above 1 is more regular (the meaning that vLLM's serving benchmark gives it).
    """
    if kind not in KINDS:
        raise BenchError(f"arrivals {kind!r} is none of {', '.join(KINDS)}")
    if kind == "at-once":
        return [0.0] * count
    if rate <= 0:
        raise BenchError(f"arrivals {kind} need a request rate above 0, not {rate:g}")
    shape = 1.0 if kind == "poisson" else burstiness
    if shape <= 0:
        raise BenchError(f"burstiness must be above 0, not {shape:g}")
    gaps = (rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))[:count]
