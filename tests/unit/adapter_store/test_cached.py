"""The cache folder: bounded, shared, and never trusted."""

import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store import (
    AdapterNotFound,
    CachedStore,
    DataLoss,
    DiskStore,
    ModelSpec,
    StoreUnavailable,
    Version,
    Weights,
)

ROOMY = 1 << 30


class Origin:
    """A store that counts what is read from it, and may be away."""

    def __init__(self, store: DiskStore) -> None:
        self.store, self.opened, self.away = store, Counter[str](), False
        self.slow: threading.Event | None = None

    def open(self, digest: str) -> Weights:
        if self.away:
            raise StoreUnavailable("away")
        self.opened[digest] += 1
        if self.slow is not None:
            self.slow.wait(60)
        return self.store.open(digest)


@pytest.fixture
def origin(store: DiskStore) -> Origin:
    return Origin(store)


@pytest.fixture
def versions(store: DiskStore, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    """All of one size."""
    return [store.put(folder, "acme", f"n{i}", spec) for i, folder in enumerate(adapters)]


@pytest.fixture
def entry_bytes(tmp_path: Path, origin: Origin, versions: list[Version]) -> int:
    folder = tmp_path / "measure"
    CachedStore(Origin(origin.store), folder, ROOMY).open(versions[0].digest).close()
    return sum(path.stat().st_size for path in (folder / "entries").rglob("*") if path.is_file())


def kept(folder: Path) -> set[str]:
    return {f"sha256:{path.name}" for path in (folder / "entries").iterdir()}


def check(folder: Path, max_bytes: int) -> None:
    files = [path for path in (folder / "entries").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= max_bytes
    assert list((folder / "tmp").iterdir()) == []


def test_one_fetch_and_then_none_even_after_a_restart_without_the_store(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    digest = versions[0].digest
    for _ in range(3):
        cache = CachedStore(origin, tmp_path / "cache", ROOMY)
        for _ in range(2):
            with cache.open(digest) as weights, origin.store.open(digest) as expected:
                assert weights.manifest == expected.manifest
                for name in expected:
                    assert np.array_equal(weights[name].lora_a, expected[name].lora_a)
                    assert np.array_equal(weights[name].lora_b, expected[name].lora_b)
    assert origin.opened == {digest: 1}
    origin.away = True
    CachedStore(origin, tmp_path / "cache", ROOMY).open(digest).close()
    with pytest.raises(StoreUnavailable):
        cache.open(versions[1].digest)
    check(tmp_path / "cache", ROOMY)


def test_what_is_discarded_is_gone_and_fetched_again(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    first, second = (version.digest for version in versions[:2])
    held = cache.open(first)
    cache.open(second).close()
    for _ in range(2):
        cache.discard(first)
        assert kept(tmp_path / "cache") == {second}
    assert held["layers.0.q_proj"].rank == 4
    cache.open(first).close()
    assert origin.opened[first] == 2
    check(tmp_path / "cache", ROOMY)


def test_the_least_recently_used_goes_first(
    tmp_path: Path, origin: Origin, versions: list[Version], entry_bytes: int
) -> None:
    room = entry_bytes * 2 + entry_bytes // 2
    cache = CachedStore(origin, tmp_path / "cache", room)
    first, second, third = (version.digest for version in versions)
    for digest in (first, second, first):
        cache.open(digest).close()
    held = cache.open(second)
    cache.open(first).close()
    cache.open(third).close()
    assert kept(tmp_path / "cache") == {first, third}
    assert held["layers.0.q_proj"].rank == 4  # evicted, and still readable for who has it
    check(tmp_path / "cache", room)
    CachedStore(origin, tmp_path / "cache", entry_bytes)  # a start with less room
    assert kept(tmp_path / "cache") == {third}


def test_what_is_larger_than_the_cache_passes(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    cache = CachedStore(origin, tmp_path / "cache", 100)
    for _ in range(2):
        with cache.open(versions[0].digest) as weights:
            assert len(weights) == 1
    assert origin.opened[versions[0].digest] == 2
    assert kept(tmp_path / "cache") == set()


@pytest.mark.parametrize("file", ["packed.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "gone", "other"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_damaged_entry_is_fetched_again(
    tmp_path: Path, origin: Origin, versions: list[Version], file: str, damage: str, fresh: bool
) -> None:
    first, second = versions[0].digest, versions[1].digest
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    for digest in (first, second):
        cache.open(digest).close()
    path, other = (
        tmp_path / "cache" / "entries" / digest.removeprefix("sha256:") / file for digest in (first, second)
    )
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
        changed = {"byte": flipped, "cut": content[:-9], "empty": b"", "other": other.read_bytes()}
        path.write_bytes(changed[damage])
    reader = CachedStore(origin, tmp_path / "cache", ROOMY) if fresh else cache
    with reader.open(first) as weights, origin.store.open(first) as expected:
        assert weights.manifest == expected.manifest
        assert np.array_equal(weights["layers.0.q_proj"].lora_b, expected["layers.0.q_proj"].lora_b)
    assert origin.opened[first] == 2
    assert path.read_bytes() == content


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(data=st.data())
def test_any_byte_of_any_entry(
    tmp_path: Path, origin: Origin, versions: list[Version], data: st.DataObject
) -> None:
    first, second = versions[0].digest, versions[1].digest
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    for digest in (first, second):
        cache.open(digest).close()
    origin.opened.clear()
    files = sorted((tmp_path / "cache" / "entries" / first.removeprefix("sha256:")).iterdir())
    path = data.draw(st.sampled_from(files), label="file")
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1), label="position")
    content[position] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    path.write_bytes(content)
    reader = CachedStore(origin, tmp_path / "cache", ROOMY)
    with reader.open(first) as weights, origin.store.open(first) as expected:
        assert weights.manifest == expected.manifest
        for half in ("lora_a", "lora_b"):
            names = [getattr(each["layers.0.q_proj"], half) for each in (weights, expected)]
            assert np.array_equal(*names)
    reader.open(second).close()
    assert origin.opened == {first: 1}


def test_what_is_held_is_told(tmp_path: Path, origin: Origin, versions: list[Version]) -> None:
    cache, other = (CachedStore(origin, tmp_path / "cache", ROOMY) for _ in range(2))
    assert cache.held() == {}
    for version in versions[:2]:
        cache.open(version.digest).close()
    sizes = {version.digest: version.manifest.num_bytes for version in versions[:2]}
    assert cache.held() == other.held() == sizes
    other.discard(versions[0].digest)
    assert cache.held() == {versions[1].digest: versions[1].manifest.num_bytes}


def test_a_cleaner_that_removes_entries_under_way(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    """What is gone from this machine is fetched again, and no reader fails."""
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    done = threading.Event()

    def clean() -> None:
        while not done.wait(0.001):
            for path in (tmp_path / "cache" / "entries").iterdir():
                shutil.rmtree(path, ignore_errors=True)

    def read() -> None:
        for number in range(60):
            version = versions[number % 3]
            with cache.open(version.digest) as weights:
                assert weights.manifest == version.manifest
                assert weights["layers.0.q_proj"].lora_a.any()

    with ThreadPoolExecutor(3) as pool:
        cleaning = pool.submit(clean)
        for each in [pool.submit(read) for _ in range(2)]:
            each.result()
        done.set()
        cleaning.result()


def test_many_first_users_of_several_caches_on_one_folder_make_one_fetch(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    origin.slow = threading.Event()
    caches = [CachedStore(origin, tmp_path / "cache", ROOMY) for _ in range(4)]
    digest = versions[0].digest
    with ThreadPoolExecutor(50) as pool:
        users = [pool.submit(caches[number % 4].open, digest) for number in range(50)]
        origin.slow.set()
        for user in users:
            user.result().close()
    assert origin.opened == {digest: 1}
    assert len(list((tmp_path / "cache" / "locks").iterdir())) == 1


def test_a_failed_fetch_leaves_nothing_and_may_be_tried_again(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    origin.away = True
    with pytest.raises(StoreUnavailable):
        cache.open(versions[0].digest)
    origin.away = False
    unknown = "sha256:" + "0" * 64
    with pytest.raises(AdapterNotFound):
        cache.open(unknown)
    assert kept(tmp_path / "cache") == set()
    cache.open(versions[0].digest).close()
    assert kept(tmp_path / "cache") == {versions[0].digest}


def test_a_cache_that_cannot_write_still_reads(
    tmp_path: Path, origin: Origin, versions: list[Version]
) -> None:
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    shutil.rmtree(tmp_path / "cache" / "entries")
    with cache.open(versions[0].digest) as weights:
        assert len(weights) == 1


def test_damage_in_the_store_is_told(tmp_path: Path, origin: Origin, versions: list[Version]) -> None:
    cache = CachedStore(origin, tmp_path / "cache", ROOMY)
    (origin.store._blobs.of(versions[0].digest).packed).write_bytes(b"")
    with pytest.raises(DataLoss):
        cache.open(versions[0].digest)
    assert kept(tmp_path / "cache") == set()
