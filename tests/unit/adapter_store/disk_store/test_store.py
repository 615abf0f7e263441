"""What only the store in a folder does."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from adapter_store import DiskStore, InvalidRef, Lease, ModelSpec, News, Ref, StoreUnavailable, open_store
from adapter_store.lease import LEASE_S
from tests.support.stores.media import collected
from tests.support.stores.small_disk import files_of_at_most


def test_the_packed_file_is_plain_safetensors(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    version = DiskStore(tmp_path / "store").put(adapters[0], "acme", "x", spec)
    blob = tmp_path / "store" / "blobs" / version.digest.removeprefix("sha256:")
    with safe_open(blob / "packed.safetensors", "np") as file:
        assert sorted(file.keys()) == ["layers.0.q_proj.lora_a", "layers.0.q_proj.lora_b"]
        assert file.metadata()["modules"] == '[["layers.0.q_proj", 4, 2.0]]'
    assert (blob / "packed.safetensors").stat().st_size == version.manifest.num_bytes


@pytest.mark.parametrize("prefix", ["", "disk:"])
def test_open_store(prefix: str, tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    store = open_store(f"{prefix}{tmp_path / 'deep' / 'store'}")
    assert store.put(adapters[0], "acme", "x", spec) == store.resolve(Ref.parse("acme/x", ""))


@pytest.mark.parametrize("url", ["", "disk:", "s3://bucket"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRef, match="store url"):
        open_store(url)


def test_a_store_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        DiskStore(tmp_path / "file" / "store")


@pytest.mark.parametrize("num_bytes", [0, 100, 10_000])
def test_a_full_disk_is_not_the_fault_of_what_is_pushed(
    num_bytes: int, tmp_path: Path, adapter: Path, spec: ModelSpec
) -> None:
    store = DiskStore(tmp_path / "store")
    with files_of_at_most(num_bytes), pytest.raises(StoreUnavailable, match="File too large") as caught:
        store.put(adapter, "acme", "x", spec)
    assert str(tmp_path) not in str(caught.value)
    assert not store.record("acme", "x").versions and not list((tmp_path / "store" / "blobs").iterdir())
    assert store.put(adapter, "acme", "x", spec).digest


def test_a_change_that_is_under_way_is_no_news_and_one_whose_process_died_is(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    root = tmp_path / "store"
    store, reader = DiskStore(root), DiskStore(root)
    version = store.put(adapters[0], "acme", "x", spec)
    before = reader.news(-1).number
    write = store._records.write
    seen = []

    def look(*arguments: Any) -> None:
        write(*arguments)
        seen.append(reader.news(before))

    store._records.write = look  # type: ignore[method-assign]
    store.set_alias("acme", "x", "prod", version.digest)
    assert seen == [News(before, frozenset())]
    assert reader.news(before) == News(before + 1, frozenset({("acme", "x")}))

    def die(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    store._records.write = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.delete_alias("acme", "x", "prod")
    assert reader.news(before + 1) == News(before + 2, frozenset({("acme", "x")}))


def test_a_store_without_its_counter_tells_nobody_that_nothing_changed(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    store = DiskStore(tmp_path / "store")
    store.put(adapters[0], "acme", "x", spec)
    (tmp_path / "store" / "changes").unlink()
    assert store.news(-1).names is None and store.news(1).names is None
    assert [s.name for s in DiskStore(tmp_path / "store").summaries("acme")] == ["x"]


def test_more_changes_than_are_remembered_are_all_that_is_told(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    store = DiskStore(tmp_path / "store")
    digest = store.put(adapters[0], "acme", "x", spec).digest
    before = store.news(-1).number
    for number in range(300):
        store.set_protected("acme", "x", digest, number % 2 == 0)
    assert store.news(before).names is None
    assert store.news(store.news(-1).number - 256).names == {("acme", "x")}


@pytest.mark.parametrize("lost", ["all of it", "one file's bytes"])
def test_who_has_a_content_is_found_again_when_the_index_is_lost(
    lost: str, tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    root = tmp_path / "store"
    digest = DiskStore(root).put(adapters[0], "acme", "x", spec).digest
    DiskStore(root).put(adapters[0], "zoo", "y", spec)
    DiskStore(root).put(adapters[1], "zoo", "z", spec)
    if lost == "all of it":
        shutil.rmtree(root / "users")  # as in a store from before there was one
    else:
        (root / "users" / digest.removeprefix("sha256:")).write_text("acme/x")
    store = DiskStore(root)
    assert store.active_names(digest) == [("acme", "x"), ("zoo", "y")]
    store.delete(Ref.parse("acme/x", ""))
    store.open(digest).close()
    assert store.active_names(digest) == [("zoo", "y")]
    store.delete(Ref.parse("zoo/y", ""))
    assert store.active_names(digest) == [] and len(list((root / "users").iterdir())) == 1


def test_a_crash_between_index_and_record_keeps_no_content_for_ever(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    root = tmp_path / "store"
    store = DiskStore(root)
    digest = store.put(adapters[0], "acme", "x", spec).digest
    store._users.add(digest, ("zoo", "y"))  # whose record was never written
    assert store.active_names(digest) == [("acme", "x")]
    store.delete(Ref.parse("acme/x", ""))
    assert list((root / "blobs").iterdir()) == []


def test_leases_that_were_being_written_when_their_holder_was_killed(tmp_path: Path) -> None:
    """They are not read, and go when no holder can be writing them any more."""
    store = DiskStore(tmp_path / "store")
    store.hold(Lease("one", 5))
    torn = [tmp_path / "store" / "leases" / f".new-{number}" for number in range(2)]
    for file in torn:
        file.write_bytes(b"half of a lease")
    long_ago = store.now() - LEASE_S - 1
    os.utime(torn[0], (long_ago, long_ago))
    torn[1].chmod(0o200)
    assert store.leases() == [Lease("one", 5)]
    assert [file.exists() for file in torn] == [False, True]


def test_content_that_a_hand_took_away_stops_no_collection(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec
) -> None:
    store = DiskStore(tmp_path / "store")
    versions = [store.put(folder, "acme", f"n{number}", spec) for number, folder in enumerate(adapters)]
    shutil.rmtree(tmp_path / "store" / "blobs" / versions[0].digest.removeprefix("sha256:"))
    for version in versions[:2]:
        store.withdraw(Ref(version.tenant, version.name, alias="latest"))
    assert collected(store) == [version.digest for version in versions[:2]]


def test_the_first_listing_reads_only_what_changed_since_the_store_was_opened(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, read = DiskStore(tmp_path / "store"), list[str]()
    for name in ("b", "a", "c"):
        other.put(adapters[0], "acme", name, spec)
    store = DiskStore(tmp_path / "store")
    lines = store._records.lines
    monkeypatch.setattr(
        store._records, "lines", lambda tenant, name: (read.append(name), lines(tenant, name))[1]
    )
    assert [summary.name for summary in store.summaries("acme")] == ["a", "b", "c"] and read == []
    other.delete(Ref.parse("acme/b", ""))
    other.put(adapters[1], "acme", "d", spec)
    assert [summary.name for summary in store.summaries("acme")] == ["a", "c", "d"]
    assert sorted(read) == ["b", "d"]


def test_who_only_reads_removes_nothing(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    version = DiskStore(tmp_path / "store").put(adapters[0], "acme", "x", spec)
    crashed = [tmp_path / "store" / "blobs" / ("0" * 64), tmp_path / "store" / "tmp" / "half"]
    for folder in crashed:
        folder.mkdir()
    open_store(str(tmp_path / "store"), create=False).open(version.digest).close()
    assert all(folder.exists() for folder in crashed)
    open_store(str(tmp_path / "store")).open(version.digest).close()
    assert not any(folder.exists() for folder in crashed)


def test_files_that_a_hand_left_stop_nothing(tmp_path: Path, adapters: list[Path], spec: ModelSpec) -> None:
    root = tmp_path / "store"
    version = DiskStore(root).put(adapters[0], "acme", "x", spec)
    for folder in ("blobs", "pushes"):
        (root / folder / ".DS_Store").write_text("")
    assert DiskStore(root, create=False).orphans() == []
    DiskStore(root).verify(Ref("acme", "x", digest=version.digest))
    assert [*root.rglob(".DS_Store")] == []
