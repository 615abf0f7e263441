"""Long texts beside everything else: the loop goes on, and short texts pass. By order, never by the clock."""

import asyncio
import random
import string
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import pytest_asyncio

from scheduler.errors import QueueFull
from scheduler.text.long_texts import LONG, MAX_LONG, TextThreads
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.scheduling import until

# Half a second of work: while it is done, the loop has many turns, or, if it is held up, one or two.
LETTERS = "".join(random.Random(1).choices(string.ascii_lowercase, k=700_000))
TURNS = 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@pytest_asyncio.fixture
async def texts() -> AsyncIterator[TextThreads]:
    with ThreadPoolExecutor(1) as pool:
        texts = TextThreads(pool)
        yield texts
        texts.close()


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(LETTERS)


@pytest.mark.parametrize("way", ["encode", "decode", "strings"])
async def test_the_loop_goes_on_while_a_long_text_is_worked_on(
    way: str, tokenizer: Tokenizer, texts: TextThreads, ids: list[int]
) -> None:
    work: dict[str, Callable[[], object]] = {
        "encode": partial(tokenizer.encode, LETTERS),
        "decode": partial(tokenizer.decode, ids),
        "strings": lambda: [*map(tokenizer.token, ids)],
    }
    task = asyncio.create_task(texts.run(len(LETTERS), work[way]))
    for _ in range(TURNS):
        await asyncio.sleep(0.001)
    assert not task.done()
    await task


async def test_a_short_text_passes_long_ones(tokenizer: Tokenizer, texts: TextThreads) -> None:
    long = [asyncio.create_task(texts.run(len(LETTERS), partial(tokenizer.encode, LETTERS))) for _ in "123"]
    await asyncio.sleep(0)
    for _ in range(10):
        assert await texts.run(5, partial(tokenizer.encode, "short")) == tokenizer.encode("short")
    assert not long[-1].done()
    for each in long:
        await each


async def test_too_many_long_texts_are_refused_and_a_single_one_never(texts: TextThreads) -> None:
    go_on = threading.Event()
    first = asyncio.create_task(texts.run(2 * MAX_LONG, partial(go_on.wait, 60)))
    await asyncio.sleep(0)
    try:
        with pytest.raises(QueueFull):
            await texts.run(LONG, lambda: 2)
        assert await texts.run(LONG - 1, lambda: 3) == 3
    finally:
        go_on.set()
    assert await first
    assert await texts.run(LONG, lambda: 4) == 4


class Text(str):
    """One that tells when it is gone."""


async def test_a_text_that_is_cancelled_while_it_waits_is_gone(texts: TextThreads) -> None:
    """At once, though the thread is still at another one; and its place is free."""
    go_on = threading.Event()
    first = asyncio.create_task(texts.run(LONG, partial(go_on.wait, 60)))
    try:
        for _ in range(3):
            text = Text("long")
            gone = weakref.ref(text)
            second = asyncio.create_task(texts.run(MAX_LONG - LONG, partial(len, text)))
            del text
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            del second
            assert gone() is None
    finally:
        go_on.set()
    assert await first


async def test_a_text_whose_caller_is_gone_counts_while_it_is_worked_on(texts: TextThreads) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(60)

    task = asyncio.create_task(texts.run(MAX_LONG, work))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.wait([task])
    try:
        with pytest.raises(QueueFull):
            await texts.run(LONG, lambda: 1)
    finally:
        go_on.set()
    await until(lambda: not texts._waiting.total)
    assert await texts.run(LONG, lambda: 2) == 2


async def test_tenants_have_the_thread_by_turns(texts: TextThreads) -> None:
    """One that comes when another has many waiting is next but one, and is not refused for them."""
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    def run(size: int, tenant: str) -> "asyncio.Task[None]":
        return asyncio.create_task(texts.run(size, lambda: order.append(tenant), tenant))

    tasks = [asyncio.create_task(texts.run(LONG, hold, "flood"))]
    await asyncio.to_thread(begun.wait, 60)
    try:
        tasks += [run((MAX_LONG - LONG) // 20, "flood") for _ in range(20)]
        await asyncio.sleep(0)
        cancelled = run(LONG, "light")
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        tasks += [run(MAX_LONG // 4, tenant) for tenant in ("light", "other")]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await run(LONG, "light")
    finally:
        go_on.set()
    await asyncio.gather(*tasks)
    assert order[:4] == ["flood", "light", "other", "flood"]
    assert not texts._waiting.total and not texts._lines


@pytest.mark.parametrize("text", ["a" * 400, "ab cd " * 60, " " * 400, "é" * 400, "<|im_end|>" * 40])
def test_no_text_has_fewer_tokens_than_is_said_at_once(text: str, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.may_have_fewer(text, count + 1)
    assert not tokenizer.may_have_fewer(text, 0)


def test_letters_are_refused_sooner_than_spaces(tokenizer: Tokenizer) -> None:
    """Of spaces the longest tokens are, in most vocabularies."""
    assert tokenizer.most_letters <= tokenizer.longest_token
    assert not tokenizer.may_have_fewer("a" * 100 * tokenizer.most_letters, 100)
    assert tokenizer.may_have_fewer("a" * 99 * tokenizer.most_letters, 100)
