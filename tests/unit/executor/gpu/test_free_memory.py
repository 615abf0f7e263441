from pathlib import Path

import pytest

from executor.gpu.free_memory import free_host_memory


def machine(root: Path, limit: str | None, used: int = 0) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal:  64 kB\nMemFree:  1 kB\nMemAvailable:      40 kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    return root


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [(None, 0, 40960), ("max", 9000, 40960), ("30000", 10000, 20000), ("99999", 10000, 40960), ("5", 6, 0)],
)
def test_what_the_machine_or_the_container_has_left(
    tmp_path: Path, limit: str | None, used: int, free: int
) -> None:
    assert free_host_memory(machine(tmp_path, limit, used)) == free


def test_this_machine_has_some() -> None:
    assert free_host_memory() > 0
