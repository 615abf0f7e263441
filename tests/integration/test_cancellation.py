"""Clients that go away, in every way: what they held is free again at once, and all of it."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.v1 import common_pb2, inference_pb2
from tests.support.services.cluster import ROOT, Cluster, Pair, wait_until
from tests.support.services.failures import Stubs, bearer, failure, raw_stubs

LONG_PROMPT, NUM_LONG = 4000, 10
NUM_CANCELS = int(os.environ.get("NUM_CANCELS", "200"))
CLIENT = """
import sys
from lorafleet import Client
with Client(sys.argv[1], token="ops") as client:
    for chunk in client.stream([5, 6, 7], adapter="quiet", max_new_tokens=3000, ignore_eos=True):
        print(len(chunk.token_ids), flush=True)
"""


@pytest.fixture(scope="module")
def stubs(main: Pair, adapter: Callable[..., Path]) -> Iterator[Stubs]:
    with main.client("ops") as client:
        client.adapters.push(adapter("quiet"), "quiet")
    with raw_stubs(main.scheduler.address) as stubs:
        yield stubs


@pytest.fixture(autouse=True)
def all_given_back(main: Pair) -> Iterator[None]:
    main.wait_idle()
    yield
    main.wait_idle()


def ask(prompt: list[int], max_new_tokens: int, adapter: str | None = "quiet") -> Any:
    return inference_pb2.GenerateRequest(
        adapter=adapter,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        stopping=common_pb2.Stopping(max_new_tokens=max_new_tokens, ignore_eos=True),
    )


def begin(stubs: Stubs) -> Callable[[], object]:
    """A stream with some tokens; returns what makes its client go away."""
    call = stubs.inference.GenerateStream(ask([5, 6, 7], 3000), metadata=bearer("ops"))
    for _ in range(3):
        next(call)
    return call.cancel


def begin_process(address: str) -> Callable[[], object]:
    command = [sys.executable, "-c", CLIENT, address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout
    for _ in range(3):
        assert process.stdout.readline()

    def kill() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    return kill


@pytest.mark.parametrize("way", ["cancelled", "killed"])
def test_a_client_that_goes_away_is_forgotten_within_two_steps(main: Pair, stubs: Stubs, way: str) -> None:
    """Long prompts of the base model make steps that take far longer than the news of a cancel."""
    go_away = begin(stubs) if way == "cancelled" else begin_process(main.scheduler.address)
    assert main.executor.gauge("slots_in_use") == 1
    draw = random.Random(1)
    crowd = [
        stubs.inference.Generate.future(
            ask([draw.randrange(3, 400) for _ in range(LONG_PROMPT)], 1, adapter=None), metadata=bearer("ops")
        )
        for _ in range(NUM_LONG)
    ]
    wait_until(lambda: main.executor.gauge("running_sequences") > 1, "a long prompt begins")
    go_away()
    before = main.executor.count("steps")
    seen: list[dict[str, float]] = []

    def is_free() -> bool:
        seen.append(main.executor.metrics())
        return seen[-1]["lorafleet_executor_slots_in_use"] == 0

    wait_until(is_free, "the slot is free")
    # The step that was under way when the client went does not count, nor does a look that comes late: what
    # was held at none of the others was held for no longer.
    held = [each["lorafleet_executor_steps_total"] - before for each in seen[:-1]]
    assert max(held, default=0) <= 1 + 2
    assert not all(call.done() for call in crowd), "the steps were not slow enough to count"
    assert [len(call.result().token_ids) for call in crowd] == [1] * NUM_LONG


def test_many_quick_cancels_leave_nothing(main: Pair, stubs: Stubs) -> None:
    """Neither work nor memory; `make cancels` makes 10,000 of them."""

    def cancel_some(count: int) -> None:
        for number in range(count):
            call = stubs.inference.GenerateStream(ask([9, 3 + number % 400], 500), metadata=bearer("ops"))
            if number % 3 == 0:
                next(call)
            call.cancel()
        main.wait_idle()

    def memory() -> float:
        nodes = (main.scheduler, main.executor)
        return sum(_resident_bytes(node.process.pid) for node in nodes)

    cancel_some(NUM_CANCELS // 2)
    before = memory()
    cancel_some(NUM_CANCELS)
    assert memory() - before < 10e6
    metrics = main.executor.metrics()
    assert metrics["lorafleet_executor_free_seats"] == 32
    assert metrics["lorafleet_executor_free_kv_blocks"] == metrics["lorafleet_executor_kv_blocks"]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_deadline_or_a_cancel_ends_the_wait_for_a_load(
    main: Pair, stubs: Stubs, adapter: Callable[..., Path], cluster: Cluster
) -> None:
    """A FIFO in the place of the manifest makes a load that does not end before we let it."""
    with main.client("ops") as client:
        digest = client.adapters.push(adapter("slow"), "slow").version.digest
        client.adapters.get("slow")  # the scheduler has the manifest now, the executor not yet
    manifest = cluster.store / "blobs" / digest.removeprefix("sha256:") / "manifest.json"
    aside = manifest.with_name("aside")
    manifest.rename(aside)
    os.mkfifo(manifest)
    try:
        first = stubs.inference.GenerateStream(ask([5, 6], 5, "slow"), metadata=bearer("ops"))
        wait_until(lambda: main.executor.gauge("loads_in_flight") == 1, "it is being loaded")
        found = failure(stubs.inference.GenerateStream, ask([5, 6], 5, "slow"), "ops", timeout=0.5)
        assert found.code == "DEADLINE_EXCEEDED"
        first.cancel()
        assert main.executor.gauge("loads_in_flight") == 1
        for name in ("running_sequences", "waiting_sequences", "slots_in_use"):
            wait_until(lambda: main.executor.gauge(name) == 0, name)  # noqa: B023
        assert main.executor.gauge("free_seats") == 32
        assert stubs.inference.Generate(ask([5, 6], 5), metadata=bearer("ops")).adapter_digest  # others run
    finally:
        wake = os.open(manifest, os.O_RDWR)  # never blocks; the reader wakes up, and looks again
        aside.rename(manifest)
        os.close(wake)
    wait_until(lambda: main.executor.gauge("loads_in_flight") == 0, "the load ends")
    answer = stubs.inference.Generate(ask([5, 6], 5, "slow"), metadata=bearer("ops"))
    assert answer.adapter_digest == digest and len(answer.token_ids) == 5
