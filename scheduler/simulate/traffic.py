"""What is asked of a simulated fleet, and when: drawn as `lorafleet bench` does, or read from a trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from lorafleet.bench.lengths import Lengths
from lorafleet.bench.workload import Description, Names, draw, read_trace
from scheduler.simulate.adapters import digest_of
from scheduler.simulate.requests import Asked


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate` requests a second, for so many seconds; `popularity`, `burstiness` and lengths are those of
    `lorafleet bench load`. `deadline_s`: the lengths of callers' patience, drawn for each; None: without end.
    """

    rate: float
    popularity: str = "zipf:1.0"
    prompt: Lengths = field(default_factory=lambda: Lengths("uniform", 128, 1024))
    output: Lengths = field(default_factory=lambda: Lengths("uniform", 64, 256))
    burstiness: float = 1.0
    tenants: int = 1
    deadline_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: as many at a time, with so many turns each, on an adapter each. A turn's prompt is all
    that was said before, and `said` more tokens; it comes `pause_s` after the last answer, about."""

    at_once: int
    turns: int = 8
    popularity: str = "zipf:1.0"
    said: Lengths = field(default_factory=lambda: Lengths("uniform", 32, 256))
    output: Lengths = field(default_factory=lambda: Lengths("uniform", 64, 256))
    pause_s: float = 5.0


def asked_of(traffic: Traffic, adapters: int, seconds: float, seed: int) -> list[Asked]:
    """In order of time; the same seed draws the same ones. Raises BenchError."""
    count = max(1, round(traffic.rate * seconds))
    described = Description(
        count,
        traffic.prompt,
        traffic.output,
        popularity=traffic.popularity,
        adapters=adapters,
        arrivals="gamma",
        rate=traffic.rate,
        burstiness=traffic.burstiness,
    )
    others = Random(f"{seed} others")
    made = []
    for drawn in draw(described, seed):
        patience = others.uniform(*traffic.deadline_s) if traffic.deadline_s else None
        tenant = f"tenant-{others.randrange(traffic.tenants)}" if traffic.tenants > 1 else "tenant"
        digest = "" if drawn.adapter is None else digest_of(drawn.adapter)
        made.append(
            Asked(drawn.at, digest, drawn.prompt_tokens, drawn.output_tokens, tenant, deadline_s=patience)
        )
    return made


def asked_of_trace(file: Path, numbers: Mapping[str, int] | None = None) -> tuple[list[Asked], int]:
    """A trace as `lorafleet bench load --trace` reads it, and how many adapters it names: they are numbered
    in the order in which they come. Raises BenchError, OSError."""
    found = dict(numbers or {})
    made = []
    for request in read_trace(file, Names(2, prefix="number "), seed=0):
        number = None if request.adapter is None else found.setdefault(request.adapter, len(found))
        digest = "" if number is None else digest_of(number)
        made.append(Asked(request.at, digest, len(request.prompt_token_ids), request.max_new_tokens))
    return made, len(found)
