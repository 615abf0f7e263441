"""kill -9 in the middle of changes, some times of each; `make crash` does it 200 times."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stores.crash_scenarios import SCENARIOS, Scenario
from tests.support.stores.store_crashes import crash

TIMES = 10


@pytest.mark.parametrize("store", ["disk", "redis"])
@pytest.mark.parametrize("make", SCENARIOS, ids=lambda make: make.name)
def test_what_was_acknowledged_is_whole(make: Callable[[Path], Scenario], store: str, tmp_path: Path) -> None:
    result = crash(store, make(tmp_path), TIMES, tmp_path / "stores")
    assert result.problems == []
    assert result.servers_killed == (TIMES // 2 if store == "redis" else 0)
