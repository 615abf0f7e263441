"""Which adapter each request names. Pure."""

from random import Random

from lorafleet.bench.errors import BenchError

FORMS = "none, one, distinct (in turn), uniform, zipf or zipf:S"


def choose(popularity: str, requests: int, adapters: int, rng: Random) -> list[int | None]:
    """An adapter's number below `adapters` for each request, None for the base model.

    `zipf:s` draws number k with weight 1 / (k + 1)^s; s is 1 when left out.
    """
    kind, _, exponent = popularity.partition(":")
    if kind == "none":
        return [None] * requests
    if adapters < 1:
        raise BenchError(f"popularity {popularity} needs at least one adapter")
    match kind:
        case "one":
            return [0] * requests
        case "distinct":
            return [number % adapters for number in range(requests)]
        case "uniform":
            return [rng.randrange(adapters) for _ in range(requests)]
        case "zipf":
            weights = [1 / (number + 1) ** _exponent(exponent) for number in range(adapters)]
            return list(rng.choices(range(adapters), weights, k=requests))
    raise BenchError(f"popularity {popularity!r} is not {FORMS}")


def _exponent(text: str) -> float:
    try:
        return float(text or 1)
    except ValueError:
        raise BenchError(f"zipf:{text} is not {FORMS}") from None
