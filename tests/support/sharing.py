"""How workers share the tests: by file, the longest first, and shared fleets on one worker alone."""

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

# What begins earlier is named earlier; what is not named comes last. A long file that began late would go on
# alone when all others are done.
_FIRST = (
    "tests/integration", "tests/fidelity", "tests/faults", "tests/kernels/test_compile.py",
    "tests/unit/executor", "tests/unit/adapter_store", "tests/unit/lorafleet/test_demo_model.py",
    "tests/unit/scheduler/dispatch/test_two_schedulers.py", "tests/kernels", "tests/contracts",
)  # fmt: skip
# Files of tests/integration that start their own fleets. Those of its conftest.py cost more than their tests.
_OWN_FLEETS = (
    "test_bench.py", "test_client_local.py", "test_client_streams.py", "test_scans.py", "test_starting.py",
    "test_upkeep.py",
)  # fmt: skip


def unit_of(nodeid: str) -> str:
    """What goes to one worker together."""
    file = nodeid.split("::", 1)[0]
    shared = file.startswith("tests/integration/") and not file.endswith(_OWN_FLEETS)
    return "tests/integration" if shared else file


class _Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(unit_of(item.nodeid)))


def _place(unit: str) -> int:
    return next((place for place, name in enumerate(_FIRST) if unit.startswith(name)), len(_FIRST))
