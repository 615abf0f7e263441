"""One record an answer: whatever order records come in, however often, and whoever sends whose key."""

import itertools
from collections.abc import Sequence

import pytest

from lorafleet.usage import merge as module
from lorafleet.usage.merge import Merged, Skipped, merge
from lorafleet.usage.record import Record, encode
from tests.support.ledger import record


def merged(*records: Record) -> list[Merged]:
    """The same in every order, and with each record twice."""
    found = []
    for order in itertools.permutations(records):
        lines = [encode(each) for each in (*order, *order)]
        found.append(sorted(merge(lines, 0, Skipped()), key=repr))
    assert all(each == found[0] for each in found)
    return found[0]


CANCELLED = {"outcome": "CANCELLED"}
PARTS: Sequence[tuple[str, Sequence[Record], int, int]] = [
    ("an end wins", (record(part=0, output=40, **CANCELLED), record(part=1, output=12, resumed=8)), 1, 32),
    ("a good end wins", (record(part=1, outcome="INTERNAL", output=9), record(part=0, output=5)), 1, 9),
    ("a later part wins", (record(part=0, output=9, time=9e9), record(part=1, output=9, resumed=9)), 1, 0),
    ("more output wins", (record(part=2, output=3, **CANCELLED), record(output=7, **CANCELLED)), 1, 3),
    ("nothing came", (record(output=0, outcome="UNAVAILABLE"), record(part=1, output=4)), 1, 0),
]


@pytest.mark.parametrize(("what", "parts", "best", "repeated"), PARTS, ids=[case[0] for case in PARTS])
def test_which_part_counts(what: str, parts: Sequence[Record], best: int, repeated: int) -> None:
    [answer] = merged(*parts)
    assert (answer.record, answer.repeated, answer.parts) == (parts[best], repeated, 2)


def test_nobody_takes_the_place_of_another_answer() -> None:
    """Who sends another one's key has an answer of their own: another tenant, version or prompt."""
    mine = record(output=5)
    others = [record(part=9, output=9, tenant="evil"), record(part=9, digest=""), record(part=9, prompt=21)]
    assert len(merged(mine, *others)) == 4


def test_a_key_that_is_sent_again_and_again_shows() -> None:
    """A client that has one answer made five times pays for one, and the work is told apart."""
    [answer] = merged(*(record(part=part, output=100) for part in range(5)))
    assert (answer.record.output, answer.repeated) == (100, 400)


def test_torn_lines_are_counted_and_nothing_else() -> None:
    lines = [encode(record(number)) for number in range(3)]
    skipped = Skipped()
    found = list(merge([lines[0], lines[1][:-40], b"\n", b"", lines[2]], 0, skipped))
    assert (len(found), skipped.lines) == (2, 3)


def test_spreading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(n // 2, part=n % 2, output=n % 7, resumed=0) for n in range(400)]
    lines = [encode(each) for each in records]
    expected = sorted(merge(lines, 0, Skipped()), key=repr)
    monkeypatch.setattr(module, "SPREAD_BYTES", 4000)
    assert sorted(merge(lines, sum(map(len, lines)), Skipped()), key=repr) == expected
    assert len(expected) == 200
