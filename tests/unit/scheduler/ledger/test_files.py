"""The files of a ledger, on a real disk: whole lines, a new file in time, and nobody else's file."""

import os
from pathlib import Path

import pytest

from lorafleet.usage.record import decode, encode, is_whole, key_of
from scheduler.ledger.files import LedgerFile, day_in, lock
from tests.support.ledger import NOON, lines_in, record
from tests.support.stores.small_disk import files_of_at_most


def test_a_line_is_read_as_it_was_written() -> None:
    written = record(7, tenant="é", outcome="CANCELLED")
    line = encode(written)
    assert is_whole(line) and decode(line) == written and key_of(line).decode() == written.key


@pytest.mark.parametrize("cut", [1, 2, 30, 60, 200])
def test_a_torn_line_is_known(cut: int) -> None:
    assert not is_whole(encode(record())[:-cut])


def test_a_changed_line_is_known() -> None:
    line = encode(record())
    assert not is_whole(line.replace(b'"output":5', b'"output":6')) and not is_whole(b"\n")


def test_two_schedulers_share_a_folder_but_no_file(tmp_path: Path) -> None:
    first, second = LedgerFile(tmp_path), LedgerFile(tmp_path)
    for number, file in enumerate((first, second, first)):
        file.append(encode(record(number)))
    assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        assert not lock(descriptor), "another may take it while its scheduler lives"
        os.close(descriptor)
    first.close()
    second.close()
    assert len(lines_in(tmp_path)) == 3


def test_a_new_file_begins_by_size_and_by_day(tmp_path: Path) -> None:
    now = NOON
    file = LedgerFile(tmp_path, max_bytes=2 * len(encode(record())), clock=lambda: now)
    for number in range(3):
        file.append(encode(record(number)))
    now += 86400
    file.append(encode(record(3)))
    file.close()
    days = [day_in(path.name) for path in sorted(tmp_path.iterdir())]
    assert days == ["2026-11-30", "2026-11-30", "2026-12-01"]
    assert len(lines_in(tmp_path)) == 4


def test_what_a_full_disk_took_of_a_line_is_taken_back(tmp_path: Path) -> None:
    line, file = encode(record()), LedgerFile(tmp_path)
    with files_of_at_most(len(line) + 40):
        file.append(line)
        for _ in range(3):
            with pytest.raises(OSError):
                file.append(line)
        assert lines_in(tmp_path) == [line]
    file.append(line)
    file.close()
    assert lines_in(tmp_path) == [line, line]


def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        LedgerFile(tmp_path / "file" / "ledger")
