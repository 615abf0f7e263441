"""What a picture of real traffic has more than that of any load."""

from pathlib import Path
from typing import Any

import pytest

from lorafleet.bench.plot import plot
from lorafleet.bench.traffic.crowds import ttft_row
from lorafleet.bench.traffic.picture import panels_of
from lorafleet.bench.traffic.step_lines import steps_row

PLAIN: dict[str, Any] = {"workload": "D1", "adapters": 0, "ours": 9.0, "unit": "output tok/s"}
PLAIN |= {"peer_default": None, "peer_best": None}
TRAFFIC = PLAIN | {
    "crowds": {"streaming": ttft_row([0.1, 0.2]), "first use": None},
    "pauses": [{"at_s": 1.0, "ms": 120.0, "streams": 3}],
    "pause_moments": 1,
}
STEP = {"rows": 64, "ms": 8.0, "captured": 64, "page_ins": 0, "preempted": 0}


def test_panels_come_with_traffic_and_with_a_trace() -> None:
    assert panels_of([PLAIN]) == []
    assert len(panels_of([PLAIN, TRAFFIC])) == 2
    assert len(panels_of([PLAIN, TRAFFIC | {"steps": steps_row([STEP])}])) == 3


def test_it_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn where it is installed")
    steps = steps_row([STEP, STEP | {"rows": 9000, "captured": 0}])
    rows = [TRAFFIC, TRAFFIC | {"steps": steps}]
    plot({"rows": rows, "gpu": None, "command": "lorafleet bench"}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
