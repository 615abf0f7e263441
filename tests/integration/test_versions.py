"""One name, new content: old streams stay with the old version, new ones get the new, on every scheduler."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet import AdapterNotFound, Client
from tests.support.adapters.oracle import Oracle
from tests.support.services.cluster import Cluster, Pair, wait_until
from tests.support.services.streams import NEAR_TIE, undisturbed, watch

PROMPT = [17, 29, 31, 43] * 12  # three blocks of 16


def test_a_new_version_never_mixes_with_the_old(main: Pair, adapter: Callable[..., Path]) -> None:
    with main.client("ops") as client:
        old = client.adapters.push(adapter("edition-1"), "book").version.digest
        expected_old = undisturbed(client, PROMPT, 900, adapter="book")
        assert client.generate(PROMPT, adapter="book", max_new_tokens=1).usage.cached_prompt_tokens >= 32
        reading = watch(client, PROMPT, 900, adapter="book")
        reading.wait_for(3)

        new = client.adapters.push(adapter("edition-2"), "book").version.digest
        assert len(reading.tokens) < 900, "the swap came too late"
        fresh = client.generate(PROMPT, adapter="book", max_new_tokens=60, ignore_eos=True)
        assert (fresh.adapter_digest, fresh.usage.cached_prompt_tokens) == (new, 0)

        reading.wait_end()
        assert reading.digest == expected_old.adapter_digest == old
        assert tuple(reading.tokens) == expected_old.token_ids

        # The same content under a name that never was anything else, and under its digest.
        client.adapters.push(adapter("edition-2"), "other-book")
        assert undisturbed(client, PROMPT, 60, adapter="other-book").token_ids == fresh.token_ids
        assert fresh.token_ids != expected_old.token_ids[:60]
        by_digest = client.generate(PROMPT, adapter=f"book@{old}", max_new_tokens=60, ignore_eos=True)
        assert by_digest.token_ids == expected_old.token_ids[:60]


def test_a_cache_that_is_warm_with_the_old_weights_serves_no_new_ones(
    main: Pair, cluster: Cluster, adapter: Callable[..., Path]
) -> None:
    """t1/x is deleted and pushed with other weights, pushed over, and pushed back, each time with a
    stream under way and without a wait. What is true is what PEFT says of each version alone."""
    prompt = [(31 * position) % 400 + 20 for position in range(48)]
    folders = [adapter(f"x-{number}") for number in range(3)]
    oracle = Oracle(cluster.model)
    truths = [oracle.greedy(folder, prompt, 60) for folder in folders]
    with main.client("ops") as client:

        def assert_serves(version: int, cached: int) -> None:
            found = client.generate(prompt, adapter="t1/x", max_new_tokens=60, ignore_eos=True)
            assert list(found.token_ids) == truths[version].tokens
            assert found.usage.cached_prompt_tokens == cached

        client.adapters.push(folders[0], "t1/x")
        assert_serves(0, cached=0)
        for old, new, deletes in ((0, 1, True), (1, 2, False), (2, 1, False)):
            reading = watch(client, prompt, 900, adapter="t1/x")
            reading.wait_for(3)
            if deletes:
                client.adapters.delete("t1/x")
            client.adapters.push(folders[new], "t1/x")
            assert_serves(new, cached=0 if new > old else 32)
            assert len(reading.tokens) < 900, "the swap came too late"
            assert_serves(new, cached=32)
            read = reading.wait_end().tokens
            truth = oracle.greedy(folders[old], prompt, 900, guess=read)
            assert min(truth.gaps) > NEAR_TIE, "choose another prompt"
            assert read == truth.tokens


def test_a_version_that_is_deleted_is_gone_and_its_stream_goes_on(
    main: Pair, adapter: Callable[..., Path]
) -> None:
    with main.client("ops") as client:
        digest = client.adapters.push(adapter("brief"), "brief").version.digest
        expected = undisturbed(client, PROMPT, 200, adapter="brief")
        reading = watch(client, PROMPT, 200, adapter="brief")
        reading.wait_for(1)
        client.adapters.delete("brief")
        for ref in ("brief", f"brief@{digest}"):
            with pytest.raises(AdapterNotFound):
                client.generate(PROMPT, adapter=ref, max_new_tokens=1)
        assert tuple(reading.wait_end().tokens) == expected.token_ids


def test_schedulers_over_one_store_agree(main: Pair, wide: Pair, adapter: Callable[..., Path]) -> None:
    """What one has done, it knows at once, and the other within a second; neither ever answers with the
    base."""
    with main.client("ops") as here, wide.client() as there:
        _take_turns(here, there, adapter)
        _take_turns(there, here, adapter)


def _take_turns(pusher: Client, asker: Client, adapter: Callable[..., Path]) -> None:
    first = pusher.adapters.push(adapter("shared-1"), "shared").version.digest
    assert _serves(pusher, first)
    wait_until(lambda: _knows(asker, first), "the other one knows it")
    for _ in range(25):
        assert _serves(asker, first)
    second = asker.adapters.push(adapter("shared-2"), "shared").version.digest
    assert _serves(asker, second)
    wait_until(lambda: _serves(pusher, second), "the other one knows it")
    pusher.adapters.set_alias("shared@latest", first)
    assert _serves(pusher, first)
    wait_until(lambda: _serves(asker, first), "the move is seen")
    pusher.adapters.delete("shared")
    asker.adapters.delete(f"shared@{second}")
    wait_until(lambda: not _knows(asker, first), "the deletions are seen")
    wait_until(lambda: not _knows(pusher, second), "the deletions are seen")
    for client in (asker, pusher):
        for ref in ("shared", f"shared@{first}", f"shared@{second}"):
            with pytest.raises(AdapterNotFound):
                client.generate(PROMPT, adapter=ref, max_new_tokens=1)


def _serves(client: Client, digest: str) -> bool:
    """Whether the alias leads there. Never to the base."""
    try:
        answer = client.generate(PROMPT, adapter="shared", max_new_tokens=1)
    except AdapterNotFound:
        return False
    assert answer.adapter_digest
    return answer.adapter_digest == digest


def _knows(client: Client, digest: str) -> bool:
    try:
        client.generate(PROMPT, adapter=f"shared@{digest}", max_new_tokens=1)
    except AdapterNotFound:
        return False
    return True
