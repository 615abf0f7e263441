"""Two schedulers over the seats of the same executors, which tell both of the same free ones."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from adapter_store import DiskStore, ModelSpec
from tests.support.adapters.peft import make_base
from tests.support.engines.executor_app import running as running_executor
from tests.support.services.scheduling import (
    LINK,
    admitted,
    dispatcher_of,
    read_all,
    ready,
    running,
    tiny_tokenizer,
    tokens_in,
)

NUM_REQUESTS = 64  # of each scheduler


async def test_two_schedulers_are_hardly_ever_refused_a_seat(tmp_path: Path) -> None:
    base, store = make_base(tmp_path / "base"), DiskStore(tmp_path / "store")
    (tmp_path / "tokenizer").mkdir()
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    link = replace(LINK, fingerprint=ModelSpec.from_folder(base).fingerprint)
    async with AsyncExitStack() as stack:
        apps = [await stack.enter_async_context(running_executor(base, store)) for _ in range(2)]
        addresses = [f"127.0.0.1:{app.port}" for app in apps]
        schedulers = [
            await stack.enter_async_context(running(dispatcher_of(addresses, tokenizer, link=link)))
            for _ in range(2)
        ]
        for scheduler in schedulers:
            await ready(scheduler, 2)
        lives = []
        for number in range(NUM_REQUESTS):
            for scheduler in schedulers:
                request = admitted(f"r{number}", prompt=[number + 3], max_new_tokens=6 + number % 7)
                request.stopping.ignore_eos = True
                lives.append(scheduler.submit(request, None))
        for live in lives:
            assert len(tokens_in(await read_all(live))) == live.admitted.stopping.max_new_tokens
        refused = sum(live.attempts - 1 for live in lives)
        assert refused <= 0.03 * (len(lives) + refused)
