"""Dispatchers over real streams to fake executors: no request is lost, no token repeated or missing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.text.tokenizer import Tokenizer
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import dispatcher_of, executors, ready, running, tiny_tokenizer


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def fake() -> AsyncIterator[FakeExecutor]:
    async with executors(1) as fakes:
        yield fakes[0]


@pytest.fixture
async def dispatcher(fake: FakeExecutor, tokenizer: Tokenizer) -> AsyncIterator[Dispatcher]:
    async with running(dispatcher_of([fake.address], tokenizer)) as started:
        await ready(started)
        yield started
