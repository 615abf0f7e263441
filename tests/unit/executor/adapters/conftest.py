"""Pagers whose adapters are only counted."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines.pager_world import Make, World, make_world


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def build(**settings: Any) -> World:
        worlds.append(make_world(**settings))
        return worlds[-1]

    yield build
    for world in worlds:
        world.pager.close()
