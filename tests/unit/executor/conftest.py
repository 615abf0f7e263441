from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_store import DiskStore, ModelSpec
from tests.support.adapters.peft import DENSE, load_base, make_adapter, make_base
from tests.support.engines.driver import Driver, make_driver
from tests.support.engines.ranks import copy_ranks
from tests.support.stores.media import versions_in


@pytest.fixture(scope="session", autouse=True)
def quick_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        copy_ranks(monkeypatch)
        yield


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def tiny_store(tiny_base: Path, store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> DiskStore:
    """Adapters default/a0 to default/a4: ranks 1, 4, 4, 8, 16; a1 on q_proj alone, a2 in layer 1 alone."""
    store = DiskStore(store_folder)
    spec, model = ModelSpec.from_folder(tiny_base), load_base(tiny_base)
    targets: list[tuple[str, ...]] = [DENSE, ("q_proj",), DENSE, DENSE, DENSE]
    for number, rank in enumerate((1, 4, 4, 8, 16)):
        folder = make_adapter(
            tmp_path_factory.mktemp("adapter"),
            model,
            seed=number,
            rank=rank,
            alpha=2 * rank,
            targets=targets[number],
            layers=[1] if number == 2 else None,
        )
        store.put(folder, "default", f"a{number}", spec)
    return store


@pytest.fixture(scope="session")
def digests(tiny_store: DiskStore) -> list[str]:
    return [version.digest for version in versions_in(tiny_store, "default")]


@pytest.fixture(scope="session")
def strangers(tiny_base: Path, tiny_store: DiskStore, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Fifteen more adapters, in another namespace: their digests."""
    spec, model = ModelSpec.from_folder(tiny_base), load_base(tiny_base)
    folders = [
        make_adapter(tmp_path_factory.mktemp("stranger"), model, seed=100 + i, rank=2, targets=("q_proj",))
        for i in range(15)
    ]
    return [tiny_store.put(folder, "many", f"x{i}", spec).digest for i, folder in enumerate(folders)]


@pytest.fixture
def make_engine(
    request: pytest.FixtureRequest, tiny_base: Path, tiny_store: DiskStore
) -> Iterator[Callable[..., Driver]]:
    """Engines on the tiny base; settings and `clock` are overrides. Its parameter is `async_scheduling`."""
    drivers = []

    def make(**settings: Any) -> Driver:
        settings = {"async_scheduling": getattr(request, "param", "auto")} | settings
        model = settings.pop("model", str(tiny_base))
        driver = make_driver(model, settings.pop("store_object", tiny_store), **settings)
        drivers.append(driver)
        return driver

    yield make
    for driver in drivers:
        driver.engine.close()
