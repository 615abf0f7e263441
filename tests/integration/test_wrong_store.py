"""An executor that was started over another store by mistake: it has most room, and costs no request."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store import open_store
from lorafleet import AdapterNotFound, Client
from tests.support.services.cluster import Cluster, Node, wait_until

READY = "lorafleet_scheduler_executors{state=ready}"
REJECTED = "lorafleet_executor_dispatches_total{outcome=rejected}"


@pytest.fixture(scope="module")
def executors(cluster: Cluster) -> list[Node]:
    other = str(cluster.folder / "other-store")
    open_store(other)
    nodes = [
        cluster.executor("right-store", "--max-loras", "2", "--max-lora-rank", "16").start(),
        cluster.executor(
            "wrong-store", "--max-loras", "8", "--max-lora-rank", "16", "--store", other
        ).start(),
    ]
    return [node.wait_ready() for node in nodes]


def test_the_other_executor_answers(
    cluster: Cluster, executors: list[Node], adapter: Callable[..., Path]
) -> None:
    right, wrong = executors
    scheduler = (
        cluster.scheduler("wrong-store-scheduler", executors, "--queue-timeout", "2").start().wait_ready()
    )
    wait_until(lambda: scheduler.metrics()[READY] == 2, "both executors are ready")

    with Client(scheduler.address, timeout=60) as client:

        def answer() -> str:
            return client.generate("The quick", adapter="misplaced", max_new_tokens=12).text

        for number in range(20):  # Until one is at home there, which four of five are: it has most slots.
            client.adapters.push(adapter(f"loud-{number}"), "misplaced")
            first = answer()
            if tried := wrong.metrics().get(REJECTED, 0):
                break
        assert tried == 1, "it was never tried"
        client.cordon(wrong.address)
        assert answer() == first
        client.cordon(wrong.address, False)
        client.cordon(right.address)
        with pytest.raises(AdapterNotFound):
            answer()
