"""A store, a tiny model and one adapter for the tests that kill services; each starts its own fleet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adapters.peft import make_adapter, make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.cluster import Cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    base = make_base(folder / "model", vocab_size=448, std=0.15, max_position_embeddings=4096)
    return write_folder(base, byte_level())


@pytest.fixture(scope="session")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "adapter", model, seed=11)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(model, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
