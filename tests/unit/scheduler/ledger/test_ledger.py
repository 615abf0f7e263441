"""While a ledger cannot be written: who is let in, what memory takes, and what becomes of it."""

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from lorafleet.doors.settings import ConfigError
from lorafleet.usage.record import encode
from scheduler.config import Config
from scheduler.errors import LedgerUnavailable
from scheduler.ledger.files import LedgerFile
from scheduler.ledger.ledger import Ledger
from scheduler.ledger.open import open_ledger
from scheduler.metrics import Metrics
from tests.support.ledger import record, records_in
from tests.support.stores.small_disk import files_of_at_most

ROOM = 4


def ledger_in(folder: Path, registry: CollectorRegistry | None = None) -> Ledger:
    metrics = Metrics(registry or CollectorRegistry()).ledger
    return Ledger(metrics, LedgerFile(folder), max_unwritten=ROOM)


async def test_memory_is_bounded_and_what_it_does_not_take_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    ledger, records = ledger_in(tmp_path, registry), [record(number) for number in range(ROOM + 2)]
    with caplog.at_level(logging.ERROR), files_of_at_most(0):
        for each in records:
            ledger.record(each)
    assert registry.get_sample_value("lorafleet_scheduler_ledger_lost_records_total") == 2
    for each in records[ROOM:]:
        assert encode(each).decode().strip() in caplog.text
    await ledger.stop()
    assert records_in(tmp_path) == records[:ROOM]


async def test_half_of_the_room_is_for_answers_that_come_back(tmp_path: Path) -> None:
    ledger = ledger_in(tmp_path)
    ledger.check(again=False)
    with files_of_at_most(0):
        for number, is_let_in in ((0, True), (1, False)):
            ledger.record(record(number))
            with pytest.raises(LedgerUnavailable):
                ledger.check(again=False)
            if is_let_in:
                ledger.check(again=True)
            else:
                with pytest.raises(LedgerUnavailable):
                    ledger.check(again=True)
    await ledger.stop()


async def test_a_scheduler_that_ends_on_a_full_disk_leaves_its_records_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = ledger_in(tmp_path)
    with caplog.at_level(logging.ERROR), files_of_at_most(0):
        ledger.record(record())
        await ledger.stop()
    assert encode(record()).decode().strip() in caplog.text


def test_a_folder_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(
        model=tmp_path, store=str(tmp_path), executor=("127.0.0.1:1",), ledger_dir=tmp_path / "file/ledger"
    )
    with pytest.raises(ConfigError, match=r"ledger_dir: .*file/ledger"):
        open_ledger(config, Metrics(CollectorRegistry()).ledger)
