"""The trace of steps says of each what it was and where its time went, and changes nothing."""

import gc
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from executor.config import ExecutorConfig
from executor.errors import StartError
from lorafleet.doors.settings import ConfigError
from tests.support.engines.driver import PROMPTS, Driver, greedy, in_both_modes

Make = Callable[..., Driver]
pytestmark = in_both_modes
PARTS = {"gap", "settle", "plan", "page_in", "build", "launch", "sample", "wait", "apply", "emit"}


def lines(driver: Driver, file: Path) -> list[dict[str, Any]]:
    driver.engine.close()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_step_has_a_line(make_engine: Make, tmp_path: Path, digests: list[str]) -> None:
    dispatches = [
        greedy(str(number), prompt, digest=digest)
        for number, (prompt, digest) in enumerate(zip(PROMPTS, [*digests[2:4], "", ""], strict=True))
    ]
    expected = make_engine().run(*dispatches)
    traced = make_engine(step_trace=str(tmp_path / "steps"))
    assert traced.run(*dispatches) == expected
    found = lines(traced, tmp_path / "steps")
    assert [line["step"] for line in found] == list(range(1, int(traced.metric("steps_total")) + 1))
    assert sum(line["rows"] for line in found) == traced.metric("tokens_total", kind="computed")
    assert all(line["rows"] == line["decode_rows"] + line["prompt_rows"] for line in found)
    assert sum(line["page_ins"] for line in found) == traced.metric("page_ins_total") == 2
    assert max(line["adapters"] for line in found) == 2
    assert {part for line in found for part in line["host_ms"]} == PARTS
    assert all(before["landed"] <= after["landed"] for before, after in pairwise(found))
    assert all(line["at"] <= line["landed"] and line["captured"] == 0 for line in found)
    last = found[-1]
    assert last["decode_rows"] == last["sequences"] == last["rows"] and not last["prompt_rows"]
    assert "device_ms" not in last, "there is no device"


def test_a_line_says_what_waits_and_for_what(make_engine: Make, tmp_path: Path, digests: list[str]) -> None:
    driver = make_engine(step_trace=str(tmp_path / "steps"), max_loras=1)
    first, second = (
        greedy(name, PROMPTS[0], digest=digest) for name, digest in zip("ab", digests[2:4], strict=True)
    )
    for digest in digests[2:4]:
        driver.engine.prefetch(digest)
    driver.until(lambda: all(driver.engine.pager.holds(digest) for digest in digests[2:4]))
    driver.run(first, second)
    found = lines(driver, tmp_path / "steps")
    assert {line["waiting_for_slot"] for line in found} == {0, 1}, "while the first one runs, and then"
    assert found[0]["waiting"] == found[0]["running"] == 1
    assert all(line["waiting_for_load"] == 0 for line in found)
    assert found[0]["free_blocks"] < found[-1]["free_blocks"] + 64


def test_a_collection_of_garbage_is_counted_where_it_was(make_engine: Make, tmp_path: Path) -> None:
    gc.disable()
    try:
        driver = make_engine(step_trace=str(tmp_path / "steps"))
        hooks = len(gc.callbacks)
        driver.engine.add(greedy("a", PROMPTS[0]))
        driver.step()
        driver.step()
        gc.collect()
        driver.until(lambda: bool(driver.finished))
    finally:
        gc.enable()
    assert [line.get("gc_ms", 0) > 0 for line in lines(driver, tmp_path / "steps")].count(True) == 1
    assert len(gc.callbacks) == hooks - 1, "it listens no more"


def test_a_step_that_fails_has_no_line_and_the_next_one_has(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_engine(step_trace=str(tmp_path / "steps"))
    driver.engine.add(greedy("lost", PROMPTS[0]))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no device"):
        patch.setattr(driver.engine._runner, "launch_forward", _fail)
        driver.step()
    driver.take(driver.engine.fail(OSError("no device")))
    driver.rejected.clear()
    driver.run(greedy("whole", PROMPTS[1]))
    found = lines(driver, tmp_path / "steps")
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert sum(line["rows"] for line in found) == driver.metric("tokens_total", kind="computed") > 0


def test_a_file_that_cannot_be_is_refused_at_the_start(make_engine: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--step-trace must be a file in a folder that is there"):
        ExecutorConfig(model="m", store="s", step_trace=str(tmp_path / "none" / "steps"))
    with pytest.raises(StartError, match=r"--step-trace .* cannot be written: Is a directory"):
        make_engine(step_trace=str(tmp_path))


def _fail(*_: object) -> None:
    raise OSError("no device")
