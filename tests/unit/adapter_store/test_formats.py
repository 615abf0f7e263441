"""A store says which format it has; nothing is made by who only reads, and no other format is guessed at."""

from pathlib import Path

import pytest

from adapter_store import DiskStore, ModelSpec, NoStore, OtherFormat, Ref, open_store
from tests.support.stores.media import DiskMedium, Medium, RedisMedium
from tests.support.stores.redis_server import RedisServer

LATEST = Ref.parse("acme/x", "")


def url_of(medium: Medium) -> str:
    if isinstance(medium, DiskMedium):
        return f"disk:{medium.root}"
    assert isinstance(medium, RedisMedium)
    return f"{medium.server.url}?namespace={medium.namespace}"


def test_a_mistyped_store_is_not_made_by_who_only_reads(medium: Medium) -> None:
    with pytest.raises(NoStore) as caught:
        open_store(url_of(medium), create=False)
    where = medium.root if isinstance(medium, DiskMedium) else medium.namespace  # type: ignore[attr-defined]
    assert str(where) in str(caught.value) and "mistyped" in str(caught.value)
    assert medium.leftovers() == [] and not (isinstance(medium, DiskMedium) and medium.root.exists())
    open_store(url_of(medium))
    assert open_store(url_of(medium), create=False).tenants() == []


def test_the_second_format_is_refused_by_name_stated_or_not(
    medium: Medium, adapters: list[Path], spec: ModelSpec
) -> None:
    """Its digests are over sha256 of the data. It did not always say that it was one."""
    medium.open().put(adapters[0], "acme", "x", spec)
    for stated in (True, False):
        _say_format(medium, 2 if stated else None)
        for create in (True, False):
            with pytest.raises(OtherFormat, match="format 2, not 4: `lorafleet adapters migrate` copies it"):
                open_store(url_of(medium), create=create)


def test_a_damaged_record_does_not_make_it_the_first(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    medium = DiskMedium(tmp_path / "store")
    store = medium.open()
    for name in ("x", "y"):
        store.put(adapters[0], "acme", name, spec)
    medium.change_record("acme", "y", lambda record: b"{")
    _say_format(medium, None)
    with pytest.raises(OtherFormat, match="format 2, not 4"):
        medium.open()


def test_what_is_pushed_after_a_flush_is_of_this_format(
    redis_medium: RedisMedium, adapters: list[Path], spec: ModelSpec
) -> None:
    store = redis_medium.open()
    store.put(adapters[0], "acme", "x", spec)
    with redis_medium.server.client() as client:
        client.delete(*redis_medium.all_keys())
    version = store.put(adapters[0], "acme", "x", spec)
    assert open_store(url_of(redis_medium), create=False).resolve(LATEST) == version


def test_a_folder_of_the_first_format_is_refused_by_name(tmp_path: Path) -> None:
    names = tmp_path / "store" / "names" / "acme"
    names.mkdir(parents=True)
    (names / "x.json").write_text('{"versions": {}, "aliases": {}}')
    for create in (True, False):
        with pytest.raises(OtherFormat, match="format 1, not 4: push its adapters into a new store"):
            DiskStore(tmp_path / "store", create=create)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["names"]


def test_a_namespace_of_the_first_format_is_refused_by_name(
    redis_medium: RedisMedium, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.set(redis_medium.keys.changes, 7)
    with pytest.raises(OtherFormat, match="format 1, not 4: push its adapters into a new store"):
        redis_medium.open()
    assert redis_medium.all_keys() == [redis_medium.keys.changes]


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_a_newer_format_is_refused(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    medium: Medium = DiskMedium(tmp_path / "store")
    if kind == "disk":
        medium.open()
        (tmp_path / "store" / "format-5").touch()
    else:
        redis: RedisMedium = request.getfixturevalue("redis_medium")
        redis.open()
        with redis.server.client() as client:
            client.set(redis.keys.format, 5)
        medium = redis
    with pytest.raises(OtherFormat, match="format 5, not 4: a newer LoraFleet"):
        medium.open()


def _say_format(medium: Medium, number: int | None) -> None:
    """None: it does not say, as none did at first."""
    if isinstance(medium, DiskMedium):
        for marker in medium.root.glob("format-*"):
            marker.unlink()
        if number is not None:
            (medium.root / f"format-{number}").touch()
        return
    assert isinstance(medium, RedisMedium)
    with medium.server.client() as client:
        client.delete(medium.keys.format)
        if number is not None:
            client.set(medium.keys.format, number)
