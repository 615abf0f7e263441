"""Turns the records of a play into numbers: throughput, latencies, failures. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from lorafleet.bench.requests import Record, Recording

CURVE_POINTS = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of some values, in milliseconds; `curve` has the percentiles CURVE_POINTS."""

    mean: float
    p50: float
    p90: float
    p99: float
    curve: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread | None":
        """None when there are no values."""
        values = sorted(seconds)
        if not values:
            return None
        p50, p90, p99 = (1000 * percentile(values, point) for point in (50, 90, 99))
        curve = tuple(round(1000 * percentile(values, point), 3) for point in CURVE_POINTS)
        return cls(1000 * fsum(values) / len(values), p50, p90, p99, curve)


@dataclass(frozen=True, slots=True)
class Summary:
    """One recording. Throughput is over the time from the first sending to the last token, prefill included.

    Answers that failed or were cut off count with the tokens that came. `errors`: how many requests ended
    with which reason. `late_ms`: how much later than due the latest request was sent, waiting for a place
    within its lane's concurrency included.
    """

    requests: int
    whole: int
    errors: Mapping[str, int]
    seconds: float
    input_tokens: int
    output_tokens: int
    adapters: int
    late_ms: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None

    @property
    def requests_per_s(self) -> float:
        return self._rate(self.whole)

    @property
    def input_tokens_per_s(self) -> float:
        return self._rate(self.input_tokens)

    @property
    def output_tokens_per_s(self) -> float:
        return self._rate(self.output_tokens)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


def summarize(recording: Recording) -> Summary:
    """The summary of what is there: requests under way count with the tokens they have so far."""
    records = recording.records
    answered = [record for record in records if record.pieces]
    return Summary(
        requests=len(records),
        whole=sum(record.whole for record in records),
        errors=dict(Counter(record.error for record in records if record.error)),
        seconds=_seconds(answered),
        input_tokens=sum(len(record.request.prompt_token_ids) for record in answered),
        output_tokens=sum(record.output_tokens for record in answered),
        adapters=len({record.request.adapter for record in records} - {None}),
        late_ms=1000 * max((record.sent - record.due for record in records), default=0.0),
        ttft_ms=Spread.of(record.pieces[0][0] - record.sent for record in answered),
        itl_ms=Spread.of(gap for record in answered for _, gap in inter_token_gaps(record)),
        tpot_ms=Spread.of(times for record in answered if (times := time_per_output_token(record))),
    )


def inter_token_gaps(record: Record) -> list[tuple[float, float]]:
    """(when, seconds) of each pause between pieces; tokens that came together have none between them."""
    return [(after, after - before) for (before, _), (after, _) in pairwise(record.pieces)]


def time_per_output_token(record: Record) -> float | None:
    """Seconds a token after the first piece; None when there was only one piece."""
    (start, count), (end, _) = record.pieces[0], record.pieces[-1]
    later = record.output_tokens - count
    return (end - start) / later if later else None


def percentile(ordered: Sequence[float], point: float) -> float:
    """The percentile by linear interpolation between the two nearest of at least one ascending value; point:
    0 to 100."""
    place = (len(ordered) - 1) * point / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _seconds(answered: Sequence[Record]) -> float:
    if not answered:
        return 0.0
    return max(record.pieces[-1][0] for record in answered) - min(record.sent for record in answered)
