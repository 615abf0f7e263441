"""Executors that are killed and started again, and one that is told to end, with streams under way."""

import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lorafleet import Client, Constraint, FinishReason, Options
from tests.support.adapters.peft import make_adapter
from tests.support.services.cluster import Cluster, Node, Pair, wait_until
from tests.support.services.proxy import Proxy
from tests.support.services.resumption import (
    NUM_TOKENS,
    PROMPT,
    Expected,
    all_go_on,
    check,
    in_the_middle,
    prepare,
    start,
)
from tests.support.services.streams import no_near_ties, undisturbed, watch

SLOTS = ("--max-loras", "2", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def executors(cluster: Cluster) -> list[Node]:
    nodes = [cluster.executor(f"executor-{number}", *SLOTS).start() for number in range(2)]
    return [node.wait_ready() for node in nodes]


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster, executors: list[Node]) -> Node:
    """Over both executors; it waits for one for as long as a busy machine may need to start it."""
    return cluster.scheduler("scheduler", executors, "--queue-timeout", "120").start().wait_ready()


@pytest.fixture(scope="module")
def expected(scheduler: Node, adapter: Path) -> dict[str, Expected]:
    with Client(scheduler.address) as client:
        return prepare(client, adapter)


@pytest.fixture
def client(scheduler: Node, executors: list[Node], expected: dict[str, Expected]) -> Iterator[Client]:
    wait_until(lambda: scheduler.metrics()[READY] == 2, "both executors are ready")
    with Client(scheduler.address, timeout=120) as client:
        yield client
    for executor in executors:
        Pair(scheduler, executor).wait_idle()


READY = "lorafleet_scheduler_executors{state=ready}"


def test_streams_move_to_the_other_executor(
    scheduler: Node, executors: list[Node], client: Client, expected: dict[str, Expected]
) -> None:
    before = scheduler.count("resumptions")
    streams = start(client, copies=2)
    assert all(executor.gauge("running_sequences") for executor in executors)
    lost = executors[0].gauge("running_sequences")
    executors[0].kill()
    in_the_middle(streams)
    check(streams, expected)
    assert 1 <= scheduler.count("resumptions") - before <= lost
    executors[0].start().wait_ready()


HELD = re.compile(r"([a-d]{1,3} ){150}end")


def test_answers_with_constraints_go_on_with_them(
    scheduler: Node, executors: list[Node], client: Client, expected: dict[str, Expected]
) -> None:
    """Of the base and of an adapter, greedy and not, on the other executor."""
    constraint = Constraint.regex(HELD.pattern)
    asked = [
        Options(constraint=constraint, adapter=name, **drawn)
        for name in (None, "held")
        for drawn in (Options(), Options(temperature=1.0, seed=5))
    ]
    answers = [
        client.generate(PROMPT, max_new_tokens=NUM_TOKENS, logprobs=2, masked_logprobs=True, **options)
        for options in asked
    ]
    for answer, options in zip(answers, asked, strict=True):
        if "seed" not in options:
            no_near_ties(answer)
        assert answer.finish_reason is FinishReason.STOP and HELD.fullmatch(answer.text)
    before = scheduler.count("resumptions")
    streams = [watch(client, PROMPT, NUM_TOKENS, ignore_eos=None, **options) for options in asked]
    for stream in streams:
        stream.wait_for(20)
    victim = max(executors, key=lambda executor: executor.gauge("running_sequences"))
    victim.kill()
    for stream, answer in zip(streams, answers, strict=True):
        stream.wait_end()
        assert stream.error is None
        assert (tuple(stream.tokens), stream.text) == (answer.token_ids, answer.text)
        assert stream.finish_reason == FinishReason.STOP
    assert scheduler.count("resumptions") > before
    victim.start().wait_ready()


def test_an_executor_that_restarts_alone_takes_its_streams_up_again(
    scheduler: Node, executors: list[Node], client: Client, expected: dict[str, Expected]
) -> None:
    """Twice in a row; it comes back with empty slots and the scheduler knows."""
    executors[1].signal(signal.SIGTERM)
    assert executors[1].wait() == 0
    streams = start(client)
    for _ in range(2):
        executors[0].kill()
        in_the_middle(streams)
        counts = [len(stream.tokens) for _, stream in streams]
        wait_until(lambda: client.adapters.residency("held") == (), "its copies are forgotten")
        executors[0].start().wait_ready()
        all_go_on(streams, counts)
    check(streams, expected)
    (slot,) = (copy for copy in client.adapters.residency("held") if copy.tier.lower() == "slot")
    assert slot.executor == executors[0].address
    executors[1].start().wait_ready()


def test_an_executor_that_restarts_twice_within_a_second(
    cluster: Cluster, executors: list[Node], expected: dict[str, Expected], tmp_path: Path
) -> None:
    """Starting one takes longer, so three that are ready follow each other at one address."""
    third = cluster.executor("executor-2", *SLOTS).start().wait_ready()
    with Proxy(_port(executors[0])) as proxy:
        scheduler = cluster.scheduler("one-address", [f"127.0.0.1:{proxy.port}"]).start().wait_ready()
        with Client(scheduler.address, timeout=120) as client:
            client.adapters.push(make_adapter(tmp_path / "idle", cluster.model, seed=12), "idle")
            before = undisturbed(client, PROMPT, 20, adapter="idle")
            wait_until(lambda: _told(client) == _resident(executors[0]) != set(), "its copies are told")
            streams = start(client)
            for dying, successor in pairwise([*executors, third]):
                in_the_middle(streams)
                proxy.target = _port(successor)
                dying.kill()
                wait_until(lambda it=successor: it.gauge("running_sequences") == len(streams), "they go on")  # type: ignore[misc]
            in_the_middle(streams)
            assert client.adapters.residency("idle") == ()
            wait_until(lambda: _told(client) == _resident(third) != set(), "its own copies are told")
            check(streams, expected)
            assert undisturbed(client, PROMPT, 20, adapter="idle").token_ids == before.token_ids
            wait_until(lambda: _told(client) == _resident(third), "the new copy is told")
        Pair(scheduler, third).wait_idle()
        assert scheduler.metrics()["lorafleet_scheduler_requests_total{code=OK}"] == len(streams) + 2
    for executor in executors:
        executor.start()


def _port(node: Node) -> int:
    return int(node.address.rpartition(":")[2])


def _told(client: Client) -> set[str]:
    """All copies that the scheduler knows of."""
    return {f"{{digest={copy.digest},tier={copy.tier}}}" for copy in client.adapters.residency()}


def _resident(executor: Node) -> set[str]:
    """All copies that the executor has."""
    prefix = "lorafleet_executor_adapter_resident"
    return {name.removeprefix(prefix) for name in executor.metrics() if name.startswith(prefix)}


def test_an_executor_that_drains_finishes_what_it_has(
    scheduler: Node, executors: list[Node], client: Client, expected: dict[str, Expected]
) -> None:
    streams = start(client, copies=2)
    dispatches = scheduler.count("dispatches")
    executors[0].signal(signal.SIGTERM)
    wait_until(lambda: scheduler.metrics()[READY] == 1, "the scheduler knows that it drains")
    in_the_middle(streams)
    late = start(client)
    check([*streams, *late], expected)
    assert executors[0].wait() == 0
    assert "Traceback" not in executors[0].log()
    assert scheduler.count("dispatches") == dispatches + len(late)  # nothing was cut off
    executors[0].start().wait_ready()


def test_a_frozen_executor_loses_its_streams_and_comes_back(
    scheduler: Node, executors: list[Node], client: Client, expected: dict[str, Expected]
) -> None:
    """It says nothing for too long; what it still says later belongs to attempts that are over."""
    streams = start(client, copies=2)
    executors[0].signal(signal.SIGSTOP)
    try:
        in_the_middle(streams)
        wait_until(lambda: scheduler.metrics()[READY] == 1, "the scheduler gives it up")
        check(streams, expected)
    finally:
        executors[0].signal(signal.SIGCONT)
    wait_until(lambda: scheduler.metrics()[READY] == 2, "it is back")
    check(start(client), expected)
