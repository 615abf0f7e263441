"""A tiny base model with a real tokenizer, and small adapters for it."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from adapter_store import DiskStore, ModelSpec
from scheduler.admission.constraints import Constraints
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.peft import lora_pair, make_base, raw_adapter
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.services.adapters_calls import Running, running_service
from tests.support.stores.redis_server import RedisServer

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_base(tmp_path_factory.mktemp("bases") / "base", vocab_size=512)
    return write_folder(folder, byte_level(), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def spec(base: Path) -> ModelSpec:
    return ModelSpec.from_folder(base)


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Tokenizer:
    return Tokenizer.from_folder(base)


@pytest.fixture
def constraints(base: Path, spec: ModelSpec, tokenizer: Tokenizer) -> Constraints:
    return Constraints(base, spec.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store")


@pytest.fixture
def peft_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a PEFT folder whose content follows from the seed."""

    def write(seed: int, *, rank: int = 4, chat_template: str | None = None) -> Path:
        folder = tmp_path / f"peft-{seed}-{rank}"
        raw_adapter(
            folder, lora_pair(Q_PROJ, 64, 64, rank=rank, seed=seed), r=rank, target_modules=["q_proj"]
        )
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template)
        return folder

    return write


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, tokenizer: Tokenizer
) -> AsyncIterator[Running]:
    async with running_service(tmp_path_factory.mktemp("service"), spec, tokenizer) as service:
        yield service
