"""One record an answer, of those of its parts and those that were shipped twice: in bounded memory.

Records are spread by their keys over temporary files, each small enough to be merged in memory. So it does
not matter in which order they come, from how many schedulers, or how long an answer took.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

from lorafleet.usage.record import FINISHED, UNSEEN, Record, decode, is_whole, key_of

# About 250,000 records, which take some 150 MB while they are merged.
SPREAD_BYTES = 64 << 20
_MOST_SPREADS = 256


@dataclass(frozen=True, slots=True)
class Merged:
    """An answer. record: the one that counts. repeated: output tokens that its parts made besides, as its
    client had not got them, or said so. parts: how many records it has."""

    record: Record
    repeated: int
    parts: int


class Skipped:
    """Counts lines that are no whole record."""

    def __init__(self) -> None:
        self.lines = 0


def merge(lines: Iterable[bytes], num_bytes: int, skipped: Skipped) -> Iterator[Merged]:
    """`num_bytes` is about what the lines have together."""
    count = min(_MOST_SPREADS, 1 + num_bytes // SPREAD_BYTES)
    if count == 1:
        yield from _merge(_whole(lines, skipped))
        return
    with ExitStack() as stack:
        spreads = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        for line in _whole(lines, skipped):
            spreads[int(key_of(line)[:8], 16) % count].write(line)
        for spread in spreads:
            yield from _merge(_again(spread))


def better(first: Record, second: Record) -> Record:
    """The better one of one answer's records: the one that saw the end, and saw it later; else the one with
    more output."""
    return max(first, second, key=_rank)


def _rank(record: Record) -> tuple[int, int, int, int, float]:
    """Parts have an order of their own, as schedulers' clocks differ. Where nobody saw an end, more output is
    more of the answer."""
    seen = 2 if record.outcome in FINISHED else 1 if record.outcome not in UNSEEN else 0
    return seen, record.part if seen else 0, record.output, record.part, record.time


def _whole(lines: Iterable[bytes], skipped: Skipped) -> Iterator[bytes]:
    for line in lines:
        if is_whole(line):
            yield line
        else:
            skipped.lines += 1


def _again(spread: IO[bytes]) -> Iterator[bytes]:
    spread.seek(0)
    return iter(spread)


def _merge(lines: Iterable[bytes]) -> Iterator[Merged]:
    """Parts are of one answer when they are of one request: who sends the key of another one, or of another
    tenant's, has made a new answer."""
    answers: dict[tuple[str, str, str, str, int], Record | list[Record]] = {}
    for line in lines:
        record = decode(line)
        answer = record.key, record.tenant, record.adapter, record.digest, record.prompt
        known = answers.setdefault(answer, record)
        if known is record or known == record:
            continue
        if isinstance(known, Record):
            answers[answer] = [known, record]
        elif record not in known:
            known.append(record)
    for parts in answers.values():
        yield Merged(parts, 0, 1) if isinstance(parts, Record) else _merged(parts)


def _merged(parts: list[Record]) -> Merged:
    best = parts[0]
    for part in parts[1:]:
        best = better(best, part)
    generated = sum(part.output - part.resumed for part in parts)
    counted = best.output - min(part.resumed for part in parts)
    return Merged(best, max(0, generated - counted), len(parts))
