import queue
from pathlib import Path

import pytest

from lorafleet.service import Service


def test_a_service_outlives_whoever_read_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is read on, or it would block as soon as the pipe is full."""
    (tmp_path / "noisy.py").write_text("for n in range(20_000): print(f'line {n}')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    lines: list[str] = []

    def log(service: str, line: str) -> None:
        lines.append(line)
        raise BrokenPipeError

    exits: queue.SimpleQueue[Service] = queue.SimpleQueue()
    service = Service("noisy", "noisy", [], "unused", log, exits)
    service.start()
    try:
        assert exits.get(timeout=60) is service
    finally:
        service.kill()
    assert (service.returncode, service.last_line, len(lines)) == (0, "line 19999", 20_000)
