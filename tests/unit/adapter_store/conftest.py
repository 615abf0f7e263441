import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapter_store import DiskStore, ModelSpec
from tests.support.adapters.peft import DENSE, make_adapter, make_base, raw_adapter, read_tensors
from tests.support.stores.media import DiskMedium, Medium, RedisMedium
from tests.support.stores.redis_server import RedisServer


@pytest.fixture(scope="session")
def d0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "d0")


@pytest.fixture(scope="session")
def d0t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "d0t", tied=True)


@pytest.fixture(scope="session")
def spec(d0: Path) -> ModelSpec:
    return ModelSpec.from_folder(d0)


@pytest.fixture(scope="session")
def dense_adapter(tmp_path_factory: pytest.TempPathFactory, d0: Path) -> Path:
    """Written by PEFT: rank 4, alpha 8, all seven projections. Not to be changed."""
    return make_adapter(tmp_path_factory.mktemp("adapters") / "dense", d0, seed=1, targets=DENSE)


@pytest.fixture(scope="session")
def full_adapter(tmp_path_factory: pytest.TempPathFactory, d0: Path) -> Path:
    """Written by PEFT, with embed_tokens and lm_head too. Not to be changed."""
    folder = tmp_path_factory.mktemp("adapters") / "full"
    return make_adapter(folder, d0, seed=2, targets=(*DENSE, "embed_tokens", "lm_head"))


@pytest.fixture
def adapter(tmp_path: Path, dense_adapter: Path) -> Path:
    """A copy of dense_adapter to damage."""
    return shutil.copytree(dense_adapter, tmp_path / "adapter")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Shared by tests with a namespace each. Not to be killed."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_medium(redis_server: RedisServer) -> RedisMedium:
    return RedisMedium(redis_server, f"test-{uuid.uuid4().hex}")


@pytest.fixture(params=["disk", "redis"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param == "disk":
        return DiskMedium(tmp_path / "store")
    medium: RedisMedium = request.getfixturevalue("redis_medium")
    return medium


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """For tests of what no medium has a part in."""
    return DiskStore(tmp_path / "store")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, dense_adapter: Path) -> list[Path]:
    """Three small adapters with different content."""
    root = tmp_path_factory.mktemp("small")
    q = {name: t for name, t in read_tensors(dense_adapter).items() if ".layers.0.self_attn.q_proj." in name}
    return [raw_adapter(root / str(i), {name: t * (i + 1) for name, t in q.items()}) for i in range(3)]


@pytest.fixture(scope="session")
def leftovers() -> Callable[[Path], list[str]]:
    """What a store folder holds beyond its lock, counter and empty folders."""
    return lambda root: DiskMedium(root).leftovers()
