"""Twice as many requests as can be done in time, through real processes: each ends well or with its error."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.bench.paced import paced_token
from lorafleet import AsyncClient, DeadlineExceeded, LoraFleetError
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import byte_level, write_folder
from tests.support.services.cluster import Cluster, Node, wait_until

TOKENS = 10
SEATS = 8
DEADLINE_S = 1.0
PATIENT, HASTY = 20, 180  # All at once; the last one's turn would be after 2.5 s.


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Node]:
    """Before an executor of 8 seats that makes a token of each every 10 ms: 80 answers a second."""
    model = make_base(tmp_path / "model", vocab_size=448, max_position_embeddings=4096)
    write_folder(model, byte_level())
    with Cluster(model, tmp_path) as cluster:
        paced = cluster.executor(
            "paced", "--max-seats", f"{SEATS}", "--max-loras", "2", "--max-lora-rank", "8"
        )
        paced.program, paced.environment["STEP_MS"] = "executor.bench.paced", "10"
        paced.start()
        yield cluster.scheduler("scheduler", [paced]).start().wait_ready()


async def ask(client: AsyncClient, number: int, timeout: float | None) -> str:
    """How it ended: "whole", or code and reason of its error."""
    prompt = [3 + number % 400, 3 + number // 400]
    try:
        answer = await client.generate(prompt, max_new_tokens=TOKENS, timeout=timeout)
    except LoraFleetError as error:
        assert timeout is not None and isinstance(error, DeadlineExceeded)
        if error.reason == "DEADLINE_UNREACHABLE":
            assert error.retry_after and float(error.metadata["estimate_s"]) > 0
        return error.reason
    return (
        "whole" if answer.token_ids == tuple(paced_token(prompt, n) for n in range(TOKENS)) else "another's"
    )


async def test_what_is_let_in_ends_and_what_would_be_late_is_told_at_once(scheduler: Node) -> None:
    async with AsyncClient(scheduler.address) as client:
        for count in (2 * SEATS, 8 * SEATS):  # Some answers, then some that had to wait.
            ends = await asyncio.gather(*(ask(client, n, None) for n in range(count)))
            assert ends == ["whole"] * count
        timeouts = [None] * PATIENT + [DEADLINE_S] * HASTY
        ends = await asyncio.gather(*(ask(client, n, timeout) for n, timeout in enumerate(timeouts)))
    assert ends[:PATIENT] == ["whole"] * PATIENT
    hasty = Counter(ends[PATIENT:])
    assert hasty.keys() <= {"whole", "DEADLINE_UNREACHABLE", "DEADLINE_EXCEEDED", ""}
    assert hasty["DEADLINE_UNREACHABLE"] > 0
    told = "lorafleet_scheduler_refused_by_estimate_total{reason=DEADLINE_UNREACHABLE}"
    assert scheduler.metrics()[told] >= hasty["DEADLINE_UNREACHABLE"]
    wait_until(lambda: scheduler.gauge("live_requests") == 0, "nothing is left behind")
