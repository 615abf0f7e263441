"""One scheduler a test, over a store with default/alice."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapter_store import ModelSpec, open_store
from tests.support.adapters.served_model import write_adapter, write_model
from tests.support.services.scheduler_house import House, open_house


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("served")) / "base")


@pytest.fixture(scope="module")
def digest(model: Path) -> str:
    """Version of default/alice, in the store beside the model."""
    store = open_store(str(model.parent / "store"))
    source = write_adapter(model.parent / "alice")
    return store.put(source, "default", "alice", ModelSpec.from_folder(model)).digest


@pytest.fixture
async def house(model: Path) -> AsyncIterator[House]:
    async with open_house(model) as house:
        yield house
