"""What the trace of steps keeps: neither garbage collections nor a full disk harm who is traced."""

import gc
from pathlib import Path

import pytest

from executor.step.trace import TracedStep
from executor.step_trace import _HostTimes, _Writer


class Collecting(dict[str, float]):
    """Garbage is collected whenever something is put in."""

    def __setitem__(self, name: str, value: float) -> None:
        gc.collect(0)
        super().__setitem__(name, value)


def test_a_collection_while_a_step_takes_its_times_ends_nothing() -> None:
    """Any thread may begin one at any moment."""
    times = _HostTimes()
    try:
        times.lap("gap")
        for _ in range(2):
            times.give(TracedStep({}, None, None, used=Collecting()))
    finally:
        times.close()


def test_what_a_full_disk_does_not_take_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as file:
        writer = _Writer(file)
        writer.write({"step": 1})
        writer.close()
        writer.write({"step": 2})
    assert "the trace of steps ends here: [Errno 28]" in caplog.text and not writer._lines
