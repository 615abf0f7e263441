"""A scheduler that is killed and started again, and one that is told to end, with streams under way."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store import Ref, VersionState, open_store
from lorafleet import AdapterNotFound, Client
from lorafleet.v1 import inference_pb2
from tests.support.services.cluster import Cluster, Pair, wait_until
from tests.support.services.failures import failure, raw_stubs
from tests.support.services.resumption import Expected, all_go_on, check, in_the_middle, prepare, start


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Pair:
    return cluster.pair("scheduler-dies", ("--max-loras", "2", "--max-lora-rank", "8"))


@pytest.fixture(scope="module")
def expected(pair: Pair, adapter: Path) -> dict[str, Expected]:
    with pair.client() as client:
        return prepare(client, adapter)


@pytest.fixture
def client(pair: Pair, expected: dict[str, Expected]) -> Iterator[Client]:
    with pair.client() as client:
        yield client
    if pair.scheduler.process.poll() is not None:  # a test failed half-way
        pair.scheduler.start().wait_ready()
    pair.wait_idle()


@pytest.mark.parametrize("times", [1, 2])
def test_streams_go_on_after_a_kill(
    pair: Pair, client: Client, expected: dict[str, Expected], times: int
) -> None:
    streams = start(client)
    for _ in range(times):
        pair.scheduler.kill()
        in_the_middle(streams)
        counts = [len(stream.tokens) for _, stream in streams]
        pair.scheduler.start().wait_ready()
        all_go_on(streams, counts)
    check(streams, expected)


def test_streams_go_on_though_their_version_was_withdrawn_meanwhile(
    pair: Pair, client: Client, expected: dict[str, Expected], cluster: Cluster, adapter: Path
) -> None:
    """Another scheduler drains the version and deletes it while the one with its streams is dead."""
    streams = start(client)
    pair.scheduler.kill()
    in_the_middle(streams)
    counts = [len(stream.tokens) for _, stream in streams]
    store, ref = open_store(str(cluster.store)), Ref("default", "held", alias="latest")
    store.withdraw(ref, VersionState.DRAINING)
    store.withdraw(ref)
    pair.scheduler.start().wait_ready()
    all_go_on(streams, counts)
    with pair.client() as other, pytest.raises(AdapterNotFound):
        other.generate([5], adapter=f"held@{expected['adapter'].digest}", max_new_tokens=1)
    check(streams, expected)
    client.adapters.push(adapter, "held")


def test_a_drain_ends_running_streams_and_refuses_new_ones(
    pair: Pair, client: Client, expected: dict[str, Expected]
) -> None:
    streams = start(client, copies=2)
    pair.scheduler.signal(signal.SIGTERM)
    wait_until(lambda: pair.scheduler.health("lorafleet.v1.Inference") == "NOT_SERVING", "it drains")
    in_the_middle(streams)
    assert pair.scheduler.health() == "SERVING"
    with raw_stubs(pair.scheduler.address) as stubs:  # our client would try again
        late = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5]))
        refused = failure(stubs.inference.Generate, late)
    assert (refused.code, refused.reason, refused.retry_s) == ("UNAVAILABLE", "DRAINING", 1.0)
    check(streams, expected)
    assert pair.scheduler.wait() == 0
    assert "Traceback" not in pair.scheduler.log()
    pair.scheduler.start().wait_ready()


def test_a_second_signal_hands_streams_back(
    pair: Pair, client: Client, expected: dict[str, Expected]
) -> None:
    """They end as UNAVAILABLE, and the client library takes them up again."""
    streams = start(client)
    pair.scheduler.signal(signal.SIGTERM)
    wait_until(lambda: pair.scheduler.health("lorafleet.v1.Inference") == "NOT_SERVING", "it drains")
    pair.scheduler.signal(signal.SIGTERM)
    assert pair.scheduler.wait() == 0
    in_the_middle(streams)
    pair.scheduler.start().wait_ready()
    check(streams, expected)
