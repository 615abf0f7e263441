"""Sums over answers, by what a caller asks for and by outcome."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from lorafleet.usage.merge import Merged
from lorafleet.usage.record import UNSEEN, Record

FIELDS: dict[str, Callable[[Record], str]] = {
    "tenant": lambda record: record.tenant,
    "adapter": lambda record: record.adapter,
    "digest": lambda record: record.digest,
    "day": lambda record: f"{datetime.fromtimestamp(record.time, UTC):%Y-%m-%d}",
}


@dataclass(slots=True)
class Sum:
    """The sum of the answers with one value of each field and one outcome. Tokens, but for `answers`."""

    answers: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    repeated: int = 0

    def add(self, merged: Merged) -> None:
        self.answers += 1
        self.prompt += merged.record.prompt
        self.cached += merged.record.cached
        self.output += merged.record.output
        self.repeated += merged.repeated


@dataclass(frozen=True, slots=True)
class Row:
    """values: of the fields, in their order. seen: whether their ends were, as far as is known."""

    values: tuple[str, ...]
    outcome: str
    seen: bool
    sum: Sum


def sum_up(
    answers: Iterable[Merged], by: Sequence[str], since: float = 0.0, until: float = float("inf")
) -> list[Row]:
    """The sums by `by`, of FIELDS, of answers in [since, until), unix seconds. Sorted, those that were seen
    first."""
    fields = [FIELDS[name] for name in by]
    sums: dict[tuple[bool, tuple[str, ...], str], Sum] = {}
    for answer in answers:
        record = answer.record
        if since <= record.time < until:
            values = tuple(field(record) for field in fields)
            place = record.outcome in UNSEEN, values, record.outcome
            sums.setdefault(place, Sum()).add(answer)
    return [
        Row(values, outcome, not unseen, sums[unseen, values, outcome])
        for unseen, values, outcome in sorted(sums)
    ]
