"""The launcher with real child processes that stand in for the services: same health, same signals."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.errors import LaunchError, ServiceEnded
from lorafleet.local import LocalConfig, LocalFleet
from tests.support.services.cluster import wait_until
from tests.support.services.processes import is_running

ROOT = Path(__file__).parents[2]
Launcher = tuple[subprocess.Popen[str], "queue.SimpleQueue[str]"]


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m scheduler` and `python -m executor` find these first."""
    for name in ("scheduler", "executor"):
        (tmp_path / name).mkdir()
        main = f"from tests.support.services.stand_in_service import main\nmain({name!r})\n"
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "__main__.py").write_text(main)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, service: str, line: str) -> None:
        self.lines.append((service, line))

    def of(self, service: str) -> list[str]:
        return [line for name, line in self.lines if name == service]


def config(**changes: object) -> LocalConfig:
    return LocalConfig(
        **{"model": Path("model"), "store": Path("store"), "port": 0, "metrics_port": 0, **changes}
    )


def pids(log: Log) -> list[int]:
    return [int(line.split()[0]) for _, line in log.lines if line[:1].isdigit()]


def test_services_start_connected_and_stop_in_order() -> None:
    log = Log()
    with LocalFleet(config(executors=2, executor_args=("--max-loras", "2")), log) as fleet:
        fleet.wait_ready(60)
        wait_until(lambda: len(pids(log)) == 3, "their first lines are read")
        (scheduler,) = log.of("scheduler")
        executors = re.findall(r"--executor (\S+)", scheduler)
        assert len(set(executors)) == 2
        assert "--model model --store store" in scheduler
        for index in range(2):
            assert log.of(f"executor-{index}")[0].endswith("--max-loras 2")
        fleet.wait(0.05)
    assert next(service for service, line in log.lines if line == "draining") == "scheduler"
    assert len([line for _, line in log.lines if line == "draining"]) == 3
    assert not any(is_running(pid) for pid in pids(log))


@pytest.mark.parametrize("service", ["scheduler", "executor"])
def test_one_that_dies_ends_all_with_its_status_and_last_line(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"STAND_IN_{service.upper()}", "die")
    log = Log()
    reason = "ended with status 3: out of luck"
    with pytest.raises(ServiceEnded, match=reason) as caught, LocalFleet(config(), log) as fleet:
        fleet.wait_ready(60)
        fleet.wait(90)
    assert caught.value.status == 3
    assert not any(is_running(pid) for pid in pids(log))


def test_one_that_is_killed_ends_all() -> None:
    log = Log()
    with pytest.raises(ServiceEnded) as caught, LocalFleet(config(), log) as fleet:
        wait_until(lambda: pids(log), "a service has told its process id")
        fleet.wait_ready(60)
        os.kill(pids(log)[0], signal.SIGKILL)
        fleet.wait(90)
    assert caught.value.status == 128 + signal.SIGKILL


def test_one_that_never_gets_ready_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_EXECUTOR", "load")
    log = Log()
    reason = "executor-0 did not become ready within 3 s"
    with pytest.raises(LaunchError, match=reason), LocalFleet(config(), log) as fleet:
        fleet.wait_ready(3)
    assert not any(is_running(pid) for pid in pids(log))


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    log = Log()
    with LocalFleet(config(), log) as fleet:
        port = int(fleet.target.rpartition(":")[2])
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: Address already in use; .*--port"):
            wait_until(lambda: pids(log), "a service is started")
            fleet.wait_ready(60)
            LocalFleet(config(port=port), log)


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_SCHEDULER", "linger")


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """`lorafleet serve` and the lines that it prints."""
    command = "-m lorafleet serve --model model --store store --port 0 --metrics-port 0"
    process = subprocess.Popen(
        [sys.executable, *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    yield process, lines
    process.kill()
    process.wait()


def until_ready(lines: "queue.SimpleQueue[str]") -> list[int]:
    """The process ids of the two services, whose logs are read on threads of their own: in any order."""
    found: list[int] = []
    ready = False
    while not ready or len(found) < 2:
        line = lines.get(timeout=60)
        ready |= line.startswith("ready: ")
        if match := re.match(r"\[[\w-]+\] (\d+) ", line):
            found.append(int(match[1]))
    return found


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_serve_stops_all_on_a_signal(number: int, status: int, launcher: Launcher) -> None:
    process, lines = launcher
    children = until_ready(lines)
    process.send_signal(number)
    assert process.wait(90) == status
    assert not any(is_running(pid) for pid in children)


def test_a_second_interrupt_stops_at_once(lingering: None, launcher: Launcher) -> None:
    process, lines = launcher
    children = until_ready(lines)
    process.send_signal(signal.SIGINT)
    while "draining" not in lines.get(timeout=90):
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130  # lingering takes 60 s
    assert not any(is_running(pid) for pid in children)


def test_a_killed_launcher_leaves_no_orphans(launcher: Launcher) -> None:
    process, lines = launcher
    children = until_ready(lines)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, children)), "they end")
