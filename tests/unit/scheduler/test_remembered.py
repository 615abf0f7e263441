from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import AdapterNotFound, DiskStore, ModelSpec, Ref, StoreUnavailable, Version
from scheduler.remembered import AWAY_SECONDS, RememberedVersions

LATEST = Ref.parse("acme/x", "")


class Leaving(DiskStore):
    away = False
    asked = 0

    def resolve(self, ref: Ref, sticky_key: str | None = None) -> Version:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("the disk is away")
        return super().resolve(ref, sticky_key)


@pytest.fixture
def leaving(tmp_path: Path) -> Leaving:
    return Leaving(tmp_path / "store")


@pytest.fixture
def version(leaving: Leaving, spec: ModelSpec, peft_folder: Callable[..., Path]) -> Version:
    return leaving.put(peft_folder(1), "acme", "x", spec)


def test_digests_are_remembered_and_aliases_are_not(leaving: Leaving, version: Version) -> None:
    now = [0.0]
    versions = RememberedVersions(leaving, lambda: now[0])
    by_digest = Ref("acme", "x", digest=version.digest)
    assert versions.resolve(LATEST) == version
    leaving.away = True
    for _ in range(3):
        assert versions.resolve(by_digest) == version
        with pytest.raises(StoreUnavailable):
            versions.resolve(LATEST)
        with pytest.raises(StoreUnavailable):
            versions.resolve(Ref("zoo", "x", digest=version.digest))  # another tenant's memory is not ours
    leaving.away = False
    now[0] += AWAY_SECONDS
    assert versions.resolve(LATEST) == version


def test_a_store_that_is_away_is_asked_once_in_a_while(leaving: Leaving, version: Version) -> None:
    now = [0.0]
    versions = RememberedVersions(leaving, lambda: now[0])
    leaving.away = True
    for second in range(3):
        now[0] = second * AWAY_SECONDS
        for _ in range(10):
            with pytest.raises(StoreUnavailable):
                versions.resolve(LATEST)
        assert leaving.asked == second + 1
    leaving.away = False
    now[0] += AWAY_SECONDS
    for _ in range(10):
        versions.resolve(LATEST)
    assert leaving.asked == 13


def test_moves_and_deletions_count_at_once(
    leaving: Leaving, version: Version, spec: ModelSpec, peft_folder: Callable[..., Path]
) -> None:
    versions = RememberedVersions(leaving)
    by_digest = Ref("acme", "x", digest=version.digest)
    assert versions.resolve(by_digest) == version
    other = leaving.put(peft_folder(2), "acme", "x", spec)
    assert versions.resolve(LATEST) == other
    leaving.delete(by_digest)
    with pytest.raises(AdapterNotFound):
        versions.resolve(by_digest)
    leaving.away = True
    with pytest.raises(StoreUnavailable):
        versions.resolve(by_digest)
