"""The trace of steps on a GPU: captured steps, and the device's times."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from adapter_store import DiskStore
from tests.support.engines.driver import PROMPTS, Driver, greedy, make_driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def driver(tiny_base: Path, tiny_store: DiskStore, tmp_path: Path) -> Iterator[Driver]:
    settings = {"device": "cuda", "compile_processes": 1, "step_trace": str(tmp_path / "steps")}
    made = make_driver(str(tiny_base), tiny_store, **settings)
    with closing(made.engine):
        yield made


def test_captured_steps_and_the_time_on_the_device(
    driver: Driver, tmp_path: Path, digests: list[str]
) -> None:
    driver.run(*(greedy(str(n), prompt, digest=digests[2]) for n, prompt in enumerate(PROMPTS)))
    driver.engine.close()
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, int(driver.metric("steps_total")) + 1))
    assert any(line["captured"] >= line["rows"] for line in lines)
    timed = [line for line in lines if "device_ms" in line]
    assert len(timed) >= len(lines) - 1, "all but perhaps the last, whose end nobody waits for"
    assert all(line["device_ms"] > 0 and line.get("device_gap_ms", 0) >= 0 for line in timed)
