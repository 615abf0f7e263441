"""Shipping to a real Redis: all of it, also when that was away, and what a predecessor left."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store import StoreUnavailable
from adapter_store.redis_store.usage_streams import UsageStreams
from lorafleet.usage.record import encode
from scheduler.ledger.files import LedgerFile, day_of
from scheduler.ledger.shipper import DAY_S, Keeping, Shipper
from tests.support.ledger import NOON, record
from tests.support.stores.redis_server import RedisServer
from tests.support.stores.small_disk import files_of_at_most


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def streams(server: RedisServer) -> UsageStreams:
    with server.client() as client:
        client.flushall()
    return UsageStreams.open(f"{server.url}?timeout=1")


class Now:
    def __init__(self) -> None:
        self.seconds = NOON

    def __call__(self) -> float:
        return self.seconds


def shipped(streams: UsageStreams, day: str = day_of(NOON)) -> list[bytes]:
    return list(streams.read(day))


def test_what_is_written_is_shipped_once(tmp_path: Path, streams: UsageStreams) -> None:
    now = Now()
    file = LedgerFile(tmp_path, max_bytes=300_000, clock=now)
    shipper = Shipper(file, lambda: streams, Keeping(7, 62), now)
    lines = [encode(record(number)) for number in range(2500)]
    shipper.turn()
    for line in lines[:1500]:
        file.append(line)
    shipper.turn()
    shipper.turn()
    assert shipped(streams) == lines[:1500]
    for line in lines[1500:]:
        file.append(line)
    shipper.turn()
    assert shipped(streams) == lines
    assert shipper.all_shipped_at == NOON
    file.close()


def test_a_successor_ships_what_was_left_and_nobody_else_does(tmp_path: Path, streams: UsageStreams) -> None:
    """Up to the line that its predecessor's crash tore; and nothing of a scheduler that lives."""
    now, lines = Now(), [encode(record(number)) for number in range(4)]
    killed, living, own = (LedgerFile(tmp_path, clock=now) for _ in range(3))
    first = Shipper(killed, lambda: streams, Keeping(7, 62), now)
    killed.append(lines[0])
    first.turn()
    killed.append(lines[1])
    path = tmp_path / killed.name
    killed.close()
    with path.open("ab") as torn:
        torn.write(lines[2][:100])
    living.append(lines[3])
    Shipper(own, lambda: streams, Keeping(7, 62), now).turn()
    assert shipped(streams) == lines[:2]
    living.close()


def test_a_redis_that_is_away_loses_nothing(
    tmp_path: Path, server: RedisServer, streams: UsageStreams
) -> None:
    now = Now()
    file = LedgerFile(tmp_path, clock=now)
    shipper = Shipper(file, lambda: streams, Keeping(7, 62), now)
    lines = [encode(record(number)) for number in range(3)]
    file.append(lines[0])
    shipper.turn()
    now.seconds += 60
    server.kill()
    try:
        file.append(lines[1])
        with pytest.raises(StoreUnavailable):
            shipper.turn()
        assert shipper.all_shipped_at == NOON
    finally:
        server.start()
    file.append(lines[2])
    shipper.turn()
    assert set(shipped(streams)) == set(lines)
    assert shipper.all_shipped_at == NOON + 60
    file.close()


def test_a_full_disk_does_not_make_it_ship_the_same_again(tmp_path: Path, streams: UsageStreams) -> None:
    """How far it is cannot be written then, but it knows."""
    now = Now()
    file = LedgerFile(tmp_path, clock=now)
    shipper = Shipper(file, lambda: streams, Keeping(7, 62), now)
    line = encode(record())
    file.append(line)
    with files_of_at_most(0):
        for _ in range(3):
            try:
                shipper.turn()
            except OSError:
                continue
    assert shipped(streams) == [line]
    file.close()


def test_files_go_some_days_after_they_were_shipped(tmp_path: Path, streams: UsageStreams) -> None:
    now = Now()
    file = LedgerFile(tmp_path, clock=now)
    shipper = Shipper(file, lambda: streams, Keeping(7, 62), now)
    file.append(encode(record()))
    old = tmp_path / file.name
    now.seconds += DAY_S
    file.append(encode(record(1)))
    shipper.turn()
    told = old.with_name(old.name + ".shipped")
    for days, left in ((6.9, True), (7.1, False)):
        os.utime(told, (NOON, NOON)) if told.exists() else None
        now.seconds = NOON + days * DAY_S
        shipper.turn()
        assert (old.exists(), told.exists()) == (left, left)
    assert (tmp_path / file.name).exists(), "the file that is written stays"
    file.close()


def test_days_go_from_redis_in_time(tmp_path: Path, server: RedisServer, streams: UsageStreams) -> None:
    now = Now()
    file = LedgerFile(tmp_path, clock=now)
    file.append(encode(record()))
    Shipper(file, lambda: streams, Keeping(7, 62), now).turn()
    with server.client() as client:
        [key] = client.keys("*usage*")
        assert client.expiretime(key) == NOON + 63 * DAY_S
    file.close()
