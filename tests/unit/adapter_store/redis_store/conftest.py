from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores.redis_server import RedisServer


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """For a test that stops it or changes its settings."""
    with RedisServer(tmp_path / "redis") as server:
        yield server
