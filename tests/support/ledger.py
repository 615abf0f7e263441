"""Usage records for tests: made up, and read back from a ledger's folder."""

from collections.abc import Iterable
from pathlib import Path

from lorafleet.usage.merge import Merged, Skipped, merge
from lorafleet.usage.record import Record, decode, is_whole
from lorafleet.usage.sources import Folder

NOON = 1796040000.0  # 2026-11-30, 12:00 UTC.


def record(number: int = 0, **changes: object) -> Record:
    fields: dict[str, object] = {
        "key": f"{number * 0x9E3779B97F4A7C15 % (1 << 128):032x}",
        "part": 0,
        "time": NOON,
        "tenant": "acme",
        "adapter": "acme/support",
        "digest": "sha256:" + "a" * 64,
        "prompt": 20,
        "cached": 16,
        "output": 5,
        "resumed": 0,
        "outcome": "LENGTH",
    }
    return Record(**(fields | changes))  # type: ignore[arg-type]


def lines_in(folder: Path) -> list[bytes]:
    return [line for file in sorted(folder.glob("*.jsonl")) for line in file.open("rb")]


def records_in(folder: Path) -> list[Record]:
    """Whole ones, in the order in which they were written."""
    return [decode(line) for line in lines_in(folder) if is_whole(line)]


def answers_in(folders: Iterable[Path], more: Iterable[bytes] = ()) -> dict[str, Merged]:
    """Merged, by their key."""
    lines = [line for folder in folders for line in Folder(folder, "").lines()]
    found = list(merge([*lines, *more], 0, Skipped()))
    answers = {merged.record.key: merged for merged in found}
    assert len(answers) == len(found), "answers share a key"
    return answers
