"""Draws requests from the description of a load: the same seed draws the same ones."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lorafleet.bench.arrivals import arrival_times
from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.bench.popularity import choose
from lorafleet.bench.requests import Request

# Below are special tokens in most vocabularies.
FIRST_TOKEN_ID = 16


@dataclass(frozen=True, slots=True)
class Names:
    """Adapter n is called `prefix` and n in four digits, as make-adapters does; tokens are random."""

    vocab_size: int
    prefix: str = "bench-"

    def adapter(self, number: int | None) -> str | None:
        return None if number is None else f"{self.prefix}{number:04d}"

    def prompt(self, length: int, rng: Random) -> tuple[int, ...]:
        low = min(FIRST_TOKEN_ID, self.vocab_size - 1)
        return tuple(rng.choices(range(low, self.vocab_size), k=length))


@dataclass(frozen=True, slots=True)
class Description:
    """`adapters` are numbered from `first_adapter` on; `arrivals` and `popularity`: see their modules."""

    requests: int
    prompt: Lengths
    output: Lengths
    popularity: str = "none"
    adapters: int = 0
    first_adapter: int = 0
    arrivals: str = "at-once"
    rate: float = 0.0
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A request without tokens: when it is due, its lengths, and its adapter's number below `adapters`."""

    at: float
    prompt_tokens: int
    output_tokens: int
    adapter: int | None


def draw(description: Description, seed: int | str) -> Iterator[Drawn]:
    """Each part has a generator of its own, so that changing one leaves the others as they were.

    Raises BenchError.
    """
    one = description
    times = arrival_times(
        one.arrivals, one.requests, Random(f"{seed} times"), rate=one.rate, burstiness=one.burstiness
    )
    adapters = choose(one.popularity, one.requests, one.adapters, Random(f"{seed} adapters"))
    rng = Random(f"{seed} lengths")
    for at, adapter in zip(times, adapters, strict=True):
        yield Drawn(at, one.prompt.draw(rng), one.output.draw(rng), adapter)


def generate(description: Description, names: Names, seed: int | str) -> list[Request]:
    """What is drawn, with random tokens. Raises BenchError."""
    first, tokens = description.first_adapter, Random(f"{seed} tokens")
    return [
        Request(
            drawn.at,
            names.prompt(drawn.prompt_tokens, tokens),
            drawn.output_tokens,
            names.adapter(None if drawn.adapter is None else drawn.adapter + first),
        )
        for drawn in draw(description, seed)
    ]


def read_trace(file: Path, names: Names, seed: int | str, limit: int | None = None) -> list[Request]:
    """JSON lines {"at": seconds, "prompt_tokens": n, "output_tokens": n, "adapter": ref, number or null}.

    The first arrives at 0, whatever its `at`. Raises BenchError naming the line, OSError.
    """
    tokens = Random(f"{seed} tokens")
    entries = sorted(_entries(file), key=lambda entry: float(entry["at"]))[:limit]
    if not entries:
        raise BenchError(f"{file} has no requests")
    first = float(entries[0]["at"])
    return [
        Request(
            float(entry["at"]) - first,
            names.prompt(entry["prompt_tokens"], tokens),
            entry["output_tokens"],
            names.adapter(entry["adapter"]) if isinstance(entry["adapter"], int) else entry["adapter"],
        )
        for entry in entries
    ]


def _entries(file: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = {"adapter": None} | json.loads(line)
        except (ValueError, TypeError) as error:
            raise BenchError(f"{file}:{number}: not a JSON object: {error}") from None
        _check(entry, f"{file}:{number}")
        yield entry


def _check(entry: Mapping[str, Any], where: str) -> None:
    for field, kinds in (("at", (int, float)), ("prompt_tokens", (int,)), ("output_tokens", (int,))):
        value = entry.get(field)
        if not isinstance(value, kinds) or not (0 if field == "at" else 1) <= value < math.inf:
            raise BenchError(f"{where}: {field} is {value!r}, not a number that fits")
    if not isinstance(entry["adapter"], str | int | None):
        raise BenchError(f"{where}: adapter is {entry['adapter']!r}, not a ref, a number or null")
