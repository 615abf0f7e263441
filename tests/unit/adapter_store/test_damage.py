"""One byte of one stored file is another one: DataLoss for that version, and all others serve."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import AdapterStore, DataLoss, ModelSpec, Ref, Version
from tests.support.stores.media import Change, DiskMedium, Medium

POSITIONS = 24  # of each file, spread over it
STORED = ("packed", "weights recipe or copy", "config", "manifest", "record")


def changer(medium: Medium, what: str, version: Version) -> Callable[[Change], None]:
    digest = version.digest
    return {
        "packed": partial(medium.change_packed, digest),
        "weights recipe or copy": partial(medium.change_pushed, version, "adapter_model.safetensors"),
        "config": partial(medium.change_pushed, version, "adapter_config.json"),
        "manifest": partial(medium.change_manifest, digest),
        "record": partial(medium.change_record, version.tenant, version.name),
    }[what]


def check_serves(store: AdapterStore, version: Version) -> None:
    ref = Ref(version.tenant, version.name, alias="latest")
    assert store.resolve(ref).digest == version.digest
    store.verify(ref)
    with store.open(version.digest) as weights:
        assert len(weights) == 1


@pytest.fixture
def versions(medium: Medium, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    store = medium.open()
    return [store.put(folder, "acme", f"n{number}", spec) for number, folder in enumerate(adapters[:2])]


@pytest.mark.parametrize("what", STORED)
def test_any_byte(medium: Medium, versions: list[Version], what: str) -> None:
    hurt, other = versions
    change = changer(medium, what, hurt)
    sizes = list[int]()
    change(lambda data: sizes.append(len(data)) or data)
    for number in range(POSITIONS):
        position = number * (sizes[0] - 1) // (POSITIONS - 1)
        flip = partial(_flipped, position=position, bit=1 << number % 8)
        change(flip)
        store = medium.open()
        with pytest.raises(DataLoss):
            store.verify(Ref(hurt.tenant, hurt.name, digest=hurt.digest))
        check_serves(store, other)
        change(flip)  # and back
    check_serves(medium.open(), hurt)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(data=st.data())
def test_any_byte_of_any_stored_value(medium: Medium, versions: list[Version], data: st.DataObject) -> None:
    hurt, other = versions
    values = medium.values(hurt)
    change = values[data.draw(st.integers(0, len(values) - 1), label="value")]
    sizes = list[int]()
    change(lambda stored: sizes.append(len(stored)) or stored)
    position = data.draw(st.integers(0, sizes[0] - 1), label="position")
    flip = partial(_flipped, position=position, bit=1 << data.draw(st.integers(0, 7), label="bit"))
    change(flip)
    try:
        store = medium.open()
        with pytest.raises(DataLoss):
            store.verify(Ref(hurt.tenant, hurt.name, digest=hurt.digest))
        check_serves(store, other)
    finally:
        change(flip)  # and back
    check_serves(medium.open(), hurt)


@pytest.mark.parametrize("what", STORED[:-1])
def test_a_push_repairs_whatever_is_damaged(
    medium: Medium, versions: list[Version], adapters: list[Path], spec: ModelSpec, what: str
) -> None:
    hurt = versions[0]
    changer(medium, what, hurt)(partial(_flipped, position=0, bit=1))
    medium.open().put(adapters[0], hurt.tenant, hurt.name, spec)
    check_serves(medium.open(), hurt)


def test_a_damaged_record_stops_no_collection(medium: Medium, versions: list[Version]) -> None:
    hurt, other = versions
    store = medium.open()
    for version in versions:
        store.withdraw(Ref(version.tenant, version.name, alias="latest"))
    medium.change_record(hurt.tenant, hurt.name, partial(_flipped, position=0, bit=1))
    assert [each.digest for each in store.collect(0, lambda _: False)] == [other.digest]


def test_what_is_read_to_serve_is_checked_when_it_is_opened(medium: Medium, versions: list[Version]) -> None:
    for what in ("packed", "manifest"):
        change = changer(medium, what, versions[0])
        flip = partial(_flipped, position=200, bit=1)
        change(flip)
        with pytest.raises(DataLoss):
            medium.open().open(versions[0].digest)
        medium.open().open(versions[1].digest).close()
        change(flip)


def test_another_way_to_write_the_same_header_is_damage(medium: Medium, versions: list[Version]) -> None:
    """The blanks that fill it up mean nothing, but they are stored bytes."""

    def retyped(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        assert data[end - 1 : end] == b" "
        return data[: end - 1] + b"\t" + data[end:]

    medium.change_packed(versions[0].digest, retyped)
    with pytest.raises(DataLoss, match="header"):
        medium.open().open(versions[0].digest)


def test_the_hashes_of_the_pushed_files(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    medium = DiskMedium(tmp_path / "store")
    version = medium.open().put(adapters[0], "acme", "x", spec)
    [hashes] = medium.root.glob("pushes/*/hashes.json")
    for position in range(0, hashes.stat().st_size, 16):
        whole = hashes.read_bytes()
        hashes.write_bytes(_flipped(whole, position, 1))
        with pytest.raises(DataLoss):
            medium.open().verify(Ref("acme", "x", digest=version.digest))
        hashes.write_bytes(whole)


def test_the_list_of_changes(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    """Only watchers read it: they are told that they may have missed something."""
    medium = DiskMedium(tmp_path / "store")
    store = medium.open()
    version = store.put(adapters[0], "acme", "x", spec)
    seen = store.news(-1).number
    changes = medium.root / "changes"
    changes.write_bytes(_flipped(changes.read_bytes(), 70, 1))
    assert store.news(seen).names is None
    assert store.set_alias("acme", "x", "prod", version.digest).generation == 1
    check_serves(medium.open(), version)


def _flipped(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
