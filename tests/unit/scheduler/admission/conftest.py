"""A store that may go away, with versions that another process put there, and what is remembered of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import (
    DiskStore,
    ModelSpec,
    PushOptions,
    Version,
)
from scheduler.admission.versions import Versions
from tests.support.services.fakes import ManualClock
from tests.support.stores.leaving_store import LeavingStore


@pytest.fixture
def store(tmp_path: Path) -> LeavingStore:
    return LeavingStore(tmp_path / "store")


@pytest.fixture
def other(store: LeavingStore, tmp_path: Path) -> DiskStore:
    """Another process's."""
    return DiskStore(tmp_path / "store")


@pytest.fixture
def version(other: DiskStore, spec: ModelSpec, peft_folder: Callable[..., Path]) -> Version:
    return other.put(peft_folder(1), "acme", "x", spec)


@pytest.fixture
def newer(other: DiskStore, version: Version, spec: ModelSpec, peft_folder: Callable[..., Path]) -> Version:
    return other.put(peft_folder(2), "acme", "x", spec, PushOptions(alias=None))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def sources() -> list[str]:
    return []


@pytest.fixture
def versions(store: LeavingStore, clock: ManualClock, sources: list[str]) -> Versions:
    versions = Versions(store, 1.0, clock=clock, count=sources.append)
    versions.ask()
    return versions
