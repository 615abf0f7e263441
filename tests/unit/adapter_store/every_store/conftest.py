"""What every store does, whatever medium is behind it (disk_store/, redis_store/: what only one does)."""

from pathlib import Path

import pytest

from adapter_store import AdapterStore, ModelSpec, Version
from tests.support.stores.media import Medium


@pytest.fixture
def store(medium: Medium) -> AdapterStore:
    return medium.open()


@pytest.fixture
def versions(store: AdapterStore, adapters: list[Path], spec: ModelSpec) -> list[Version]:
    """Three versions of acme/x, pushed in order: latest is the last one."""
    return [store.put(folder, "acme", "x", spec) for folder in adapters]
